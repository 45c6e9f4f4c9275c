-- The tables of the store in SQLite; those of the other database have the same columns. A change here raises
-- SCHEMA_VERSION in open.py.

-- Conversations. Blocks are stored once, under a hash of their whole JSON form, and linked from places of a branch. A
-- node is one step of a tree: it keeps the first blocks of its parent's path and adds its own. Nodes that only append
-- share a branch with their parent, so a path of ten thousand nodes is read in one range. Forks are conversations on
-- one tree. A conversation belongs to a namespace; the name of the default one, the administrator's, is empty.
-- AUTOINCREMENT: SQLite would give a new row the number of a deleted one, which a caller may still hold.
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    title TEXT NOT NULL,
    archived INTEGER NOT NULL,
    tree INTEGER NOT NULL,
    head INTEGER NOT NULL,
    mode TEXT,
    retention REAL,
    data TEXT,
    forked_from TEXT,
    forked_at INTEGER,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    ttl REAL,
    namespace TEXT NOT NULL DEFAULT '',
    delete_at REAL
);

CREATE UNIQUE INDEX conversations_by_id ON conversations (namespace, id);
CREATE INDEX conversations_by_tree ON conversations (tree);
CREATE INDEX conversations_forked ON conversations (namespace) WHERE forked_from IS NOT NULL;
CREATE INDEX conversations_by_time ON conversations (namespace, updated_at);

CREATE TABLE tags (
    conversation INTEGER NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (conversation, tag)
) WITHOUT ROWID;

CREATE TABLE blocks (
    id INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    id_hash BLOB NOT NULL,
    body TEXT NOT NULL
);

CREATE INDEX blocks_by_id_hash ON blocks (id_hash);

CREATE TABLE links (
    branch INTEGER NOT NULL,
    place INTEGER NOT NULL,
    block INTEGER NOT NULL,
    PRIMARY KEY (branch, place)
) WITHOUT ROWID;

CREATE INDEX links_by_block ON links (block);

-- checksum: of all columns, so that verify detects a change in any of them.
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tree INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    conversation INTEGER NOT NULL,
    kind TEXT NOT NULL,
    kept INTEGER NOT NULL,
    length INTEGER NOT NULL,
    depth INTEGER NOT NULL,
    memory TEXT,
    created_at REAL NOT NULL,
    checksum BLOB
);

CREATE INDEX nodes_by_tree ON nodes (tree, branch, kept);
CREATE INDEX nodes_by_start ON nodes (parent) WHERE parent > 0 AND (branch = id OR kept = length);

CREATE TABLE scopes (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);

-- A response has the number of the node that it made; a failed one made an empty node. It decides which request may
-- follow it, so it has a checksum too.
CREATE TABLE responses (
    node INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    provider TEXT NOT NULL,
    scope INTEGER NOT NULL,
    provider_response_id TEXT,
    model TEXT NOT NULL,
    mode TEXT NOT NULL,
    anchor TEXT,
    reason TEXT,
    healed TEXT,
    sent_blocks INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL,
    saved_blocks INTEGER NOT NULL,
    saved_bytes INTEGER NOT NULL,
    input_tokens INTEGER,
    cached_tokens INTEGER,
    output_tokens INTEGER,
    reasoning_tokens INTEGER,
    cost REAL,
    first_token_seconds REAL,
    seconds REAL NOT NULL,
    status TEXT NOT NULL,
    error TEXT,
    error_code TEXT,
    is_resent INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    stored INTEGER NOT NULL,
    digest BLOB,
    block_count INTEGER,
    depth INTEGER,
    root_created_at REAL,
    barrier INTEGER,
    derived TEXT,
    lost_reason TEXT,
    unusable_reason TEXT,
    counted TEXT,
    predicted_cached_tokens INTEGER,
    cache_write_tokens INTEGER,
    cache_savings REAL,
    settings TEXT,
    results_by_id INTEGER NOT NULL,
    results_by_fallback INTEGER NOT NULL,
    results_unmatched INTEGER NOT NULL,
    rejected TEXT,
    more_rejected INTEGER NOT NULL,
    start INTEGER NOT NULL,
    omitted TEXT,
    -- While the response is generated in the background: the request as it was sent, as JSON.
    sent_request TEXT,
    checksum BLOB
);

CREATE INDEX responses_by_digest ON responses (digest, scope);
CREATE INDEX responses_by_time ON responses (created_at);
-- Comparisons: for a list of more than two values SQLite builds a temporary table whenever a response is stored.
CREATE INDEX responses_failed ON responses (conversation)
WHERE status <> 'completed' AND status <> 'lost' AND status <> 'cancelled';

-- Idempotency: who answers the message with this key and until when, and the nodes of its question and its answer. Every use
-- of a key must have the same hash of the request.
CREATE TABLE claims (
    conversation INTEGER NOT NULL,
    key TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    owner TEXT NOT NULL,
    lease_until REAL NOT NULL,
    question INTEGER,
    answer INTEGER,
    PRIMARY KEY (conversation, key)
) WITHOUT ROWID;

-- Telemetry of nodes: what went wrong, and what took long. Bodies are stored only with keep_bodies.
CREATE TABLE incidents (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    node INTEGER NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    scope INTEGER NOT NULL,
    created_at REAL NOT NULL
);

CREATE INDEX incidents_by_conversation ON incidents (conversation);
CREATE INDEX incidents_by_node ON incidents (node);

CREATE TABLE tool_runs (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    outcome TEXT NOT NULL,
    seconds REAL NOT NULL,
    created_at REAL NOT NULL
);

CREATE INDEX tool_runs_by_conversation ON tool_runs (conversation);
CREATE INDEX tool_runs_by_node ON tool_runs (node);

CREATE TABLE exchanges (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    node INTEGER NOT NULL,
    request BLOB NOT NULL,
    reply BLOB NOT NULL,
    status INTEGER,
    created_at REAL NOT NULL
);

CREATE INDEX exchanges_by_conversation ON exchanges (conversation);
CREATE INDEX exchanges_by_node ON exchanges (node);

-- The search index. Whoever searches adds the blocks that are not in it.
-- Each group of blocks has a full-text table of its own (texts_0, texts_1, …), which is created when it is first needed,
-- because SQLite overwrites deleted terms only by rewriting a table. This one has the numbers of the indexed blocks.
CREATE TABLE texts (
    rowid INTEGER PRIMARY KEY
);

-- The last node whose blocks are in the index.
CREATE TABLE indexed (
    node INTEGER NOT NULL
);

INSERT INTO indexed (node) VALUES (0);

-- What is known about the memory of each server.
CREATE TABLE evidence (
    name TEXT NOT NULL PRIMARY KEY,
    form TEXT NOT NULL,
    updated_at REAL NOT NULL
);

-- The last response in each conversation object of a server; empty while a request of the owner continues the object.
CREATE TABLE objects (
    name TEXT NOT NULL PRIMARY KEY,
    last TEXT NOT NULL,
    owner TEXT NOT NULL,
    made INTEGER NOT NULL, -- whether Kedge created the object
    updated_at REAL NOT NULL
);

-- Requests of programs that do not know Kedge, which are chained by content (kedge.chaining). Processes that share
-- a store share the index of known responses and the key that hashes credentials.
CREATE TABLE response_index (
    scope TEXT NOT NULL,
    response_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    entry TEXT NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (scope, response_id)
);

CREATE INDEX response_index_by_digest ON response_index (scope, digest);
CREATE INDEX response_index_by_age ON response_index (created_at);

CREATE TABLE scope_keys (
    name TEXT NOT NULL PRIMARY KEY,
    value BLOB NOT NULL
);

CREATE TABLE proxied_requests (
    id INTEGER PRIMARY KEY,
    created_at REAL NOT NULL,
    upstream TEXT NOT NULL,
    model TEXT NOT NULL,
    status INTEGER NOT NULL,
    seconds REAL NOT NULL,
    anchor TEXT NOT NULL,
    response_id TEXT NOT NULL,
    sent_blocks INTEGER NOT NULL,
    full_blocks INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL,
    full_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL,
    healed TEXT NOT NULL,
    is_resent INTEGER NOT NULL,
    is_lost INTEGER NOT NULL,
    is_refused INTEGER NOT NULL,
    error_code TEXT NOT NULL,
    error TEXT NOT NULL,
    input_tokens INTEGER,
    cached_tokens INTEGER,
    output_tokens INTEGER,
    reasoning_tokens INTEGER,
    request BLOB,
    response BLOB,
    namespace TEXT NOT NULL DEFAULT ''
);

CREATE INDEX proxied_requests_by_namespace ON proxied_requests (namespace, id);

-- Users. Tokens and sessions are stored as hashes, so reading the database gives no access. Counts of requests and
-- tokens are rows, so that limits hold for all processes together.
CREATE TABLE access_tokens (
    name TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    hash BLOB NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    created_at REAL NOT NULL
);

CREATE TABLE access_sessions (
    hash BLOB PRIMARY KEY,
    token TEXT NOT NULL,
    expires_at REAL NOT NULL
);

CREATE INDEX access_sessions_by_token ON access_sessions (token);

CREATE TABLE access_counts (
    token TEXT PRIMARY KEY,
    minute INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens INTEGER NOT NULL
);

-- Sums of responses, for statistics and lists. Responses up to summed.node are in them; newer ones are added in
-- batches.
CREATE TABLE summed (
    node INTEGER NOT NULL
);

INSERT INTO summed (node) VALUES (0);

CREATE TABLE response_sums (
    namespace TEXT NOT NULL,
    day INTEGER NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    is_resent INTEGER NOT NULL,
    mode TEXT NOT NULL,
    is_chained INTEGER NOT NULL,
    has_id INTEGER NOT NULL,
    reason TEXT NOT NULL,
    healed TEXT NOT NULL,
    pricing TEXT NOT NULL,
    responses INTEGER NOT NULL,
    sent_blocks INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL,
    saved_blocks INTEGER NOT NULL,
    saved_bytes INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    predictions INTEGER NOT NULL,
    predicted_tokens INTEGER NOT NULL,
    predicted_cached_tokens INTEGER NOT NULL,
    cache_write_tokens INTEGER NOT NULL,
    uncached_tokens INTEGER NOT NULL,
    results_by_id INTEGER NOT NULL,
    results_by_fallback INTEGER NOT NULL,
    results_unmatched INTEGER NOT NULL,
    cache_savings REAL NOT NULL,
    cost REAL NOT NULL,
    PRIMARY KEY (
        namespace, day, provider, model, status, is_resent, mode, is_chained, has_id, reason, healed, pricing
    )
) WITHOUT ROWID;

-- Day -1 has the counts of all days.
CREATE TABLE latency_counts (
    namespace TEXT NOT NULL,
    day INTEGER NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    is_first_token INTEGER NOT NULL,
    seconds REAL NOT NULL,
    responses INTEGER NOT NULL,
    PRIMARY KEY (namespace, day, provider, model, is_first_token, seconds)
) WITHOUT ROWID;

-- Day -1 has the sums of all days.
CREATE TABLE conversation_sums (
    namespace TEXT NOT NULL,
    day INTEGER NOT NULL,
    conversation INTEGER NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    responses INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    PRIMARY KEY (namespace, day, conversation, provider, model)
) WITHOUT ROWID;

-- How many responses have an id, and how many were chained on it; an id that nothing was chained on ends a chain.
CREATE TABLE chain_links (
    namespace TEXT NOT NULL,
    scope INTEGER NOT NULL,
    response_id TEXT NOT NULL,
    depth INTEGER NOT NULL,
    day INTEGER NOT NULL,
    responses INTEGER NOT NULL,
    children INTEGER NOT NULL,
    PRIMARY KEY (namespace, scope, response_id)
) WITHOUT ROWID;

CREATE INDEX chain_ends ON chain_links (namespace, day, depth, responses) WHERE children = 0 AND depth > 0;

-- What each response adds to the rows of a table of sums.
CREATE VIEW response_sums_parts AS
SELECT
    r.node,
    r.conversation,
    r.created_at,
    c.namespace,
    CAST(r.created_at / 86400 AS INTEGER) AS day,
    r.provider,
    r.model,
    r.status,
    r.is_resent,
    r.mode,
    CASE WHEN r.anchor IS NULL OR r.status = 'refused' THEN 0 ELSE 1 END AS is_chained,
    CASE WHEN r.provider_response_id IS NULL THEN 0 ELSE 1 END AS has_id,
    COALESCE(r.reason, '') AS reason,
    COALESCE(r.healed, '') AS healed,
    CASE
        WHEN r.cost IS NOT NULL THEN 'stored' WHEN r.input_tokens IS NOT NULL THEN 'unknown' ELSE 'none'
    END AS pricing,
    1 AS responses,
    r.sent_blocks,
    r.sent_bytes,
    r.saved_blocks,
    r.saved_bytes,
    COALESCE(r.input_tokens, 0) AS input_tokens,
    COALESCE(r.cached_tokens, 0) AS cached_tokens,
    COALESCE(r.output_tokens, 0) AS output_tokens,
    COALESCE(r.reasoning_tokens, 0) AS reasoning_tokens,
    CASE WHEN r.predicted_cached_tokens + r.cached_tokens IS NULL THEN 0 ELSE 1 END AS predictions,
    CASE WHEN r.cached_tokens IS NULL THEN 0 ELSE COALESCE(r.predicted_cached_tokens, 0) END AS predicted_tokens,
    CASE WHEN r.predicted_cached_tokens IS NULL THEN 0 ELSE COALESCE(r.cached_tokens, 0) END
        AS predicted_cached_tokens,
    COALESCE(r.cache_write_tokens, 0) AS cache_write_tokens,
    CASE WHEN COALESCE(r.input_tokens, 0) > COALESCE(r.cached_tokens, 0)
        THEN r.input_tokens - COALESCE(r.cached_tokens, 0) ELSE 0 END AS uncached_tokens,
    r.results_by_id,
    r.results_by_fallback,
    r.results_unmatched,
    COALESCE(r.cache_savings, 0.0) AS cache_savings,
    COALESCE(r.cost, 0.0) AS cost
FROM responses r JOIN conversations c ON c.number = r.conversation;

-- The durations of an answer and of its first token, rounded to three digits to limit the number of rows.
CREATE VIEW latency_counts_parts AS
SELECT
    r.node,
    c.namespace,
    CASE WHEN t.is_total = 1 THEN -1 ELSE CAST(r.created_at / 86400 AS INTEGER) END AS day,
    r.provider,
    r.model,
    k.is_first AS is_first_token,
    CAST(printf('%.2e', CASE WHEN k.is_first = 1 THEN r.first_token_seconds ELSE r.seconds END) AS REAL) AS seconds,
    1 AS responses
FROM responses r JOIN conversations c ON c.number = r.conversation
CROSS JOIN (SELECT 0 AS is_total UNION ALL SELECT 1) t
CROSS JOIN (SELECT 0 AS is_first UNION ALL SELECT 1) k
WHERE r.status IN ('completed', 'lost') AND CASE WHEN k.is_first = 1 THEN r.first_token_seconds ELSE r.seconds END IS NOT NULL;

CREATE VIEW conversation_sums_parts AS
SELECT
    p.node,
    p.namespace,
    CASE WHEN t.is_total = 1 THEN -1 ELSE p.day END AS day,
    p.conversation,
    p.provider,
    p.model,
    1 AS responses,
    p.input_tokens + p.output_tokens AS tokens,
    p.cost
FROM response_sums_parts p CROSS JOIN (SELECT 0 AS is_total UNION ALL SELECT 1) t;

-- An id may be known as an anchor before its response is added. A rejected or stopped request continues no chain.
CREATE VIEW chain_links_parts AS
SELECT
    r.node,
    c.namespace,
    r.scope,
    r.provider_response_id AS response_id,
    COALESCE(r.depth, 0) AS depth,
    CAST(r.created_at / 86400 AS INTEGER) AS day,
    1 AS responses,
    0 AS children
FROM responses r JOIN conversations c ON c.number = r.conversation WHERE r.provider_response_id IS NOT NULL
UNION ALL
SELECT r.node, c.namespace, r.scope, r.anchor, 0, 0, 0, 1
FROM responses r JOIN conversations c ON c.number = r.conversation WHERE r.anchor IS NOT NULL AND r.depth > 0;
