-- Why: requests of programs that do not know Kedge are chained by content (kedge.incremental). Processes that
-- share a store share the index of known responses and the key that hashes credentials, and a page can show what
-- a proxy did.

CREATE TABLE response_index (
    scope TEXT NOT NULL,
    response_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    entry TEXT NOT NULL,
    created_at {real} NOT NULL,
    PRIMARY KEY (scope, response_id)
);

CREATE INDEX response_index_by_digest ON response_index (scope, digest);

CREATE INDEX response_index_by_age ON response_index (created_at);

CREATE TABLE scope_keys (
    name TEXT NOT NULL PRIMARY KEY,
    value {bytes} NOT NULL
);

CREATE TABLE proxied_requests (
    id {serial},
    created_at {real} NOT NULL,
    upstream TEXT NOT NULL,
    model TEXT NOT NULL,
    status {integer} NOT NULL,
    seconds {real} NOT NULL,
    previous_response_id TEXT NOT NULL,
    response_id TEXT NOT NULL,
    sent_items {integer} NOT NULL,
    full_items {integer} NOT NULL,
    sent_bytes {integer} NOT NULL,
    full_bytes {integer} NOT NULL,
    reason TEXT NOT NULL,
    healed TEXT NOT NULL,
    is_lost {integer} NOT NULL,
    request {bytes},
    response {bytes}
);
