-- Why: analyze and sorted lists looked at every response that was ever stored. Sums of responses by day and kind, counts
-- of rounded latencies, sums by conversation and day, and the ends of chains are maintained instead, so their cost is
-- that of what is shown. Responses up to `summed.node` are in the sums; newer ones are added in batches.

CREATE TABLE summed (
    node {integer} NOT NULL
);

INSERT INTO summed (node) VALUES (0);

CREATE TABLE response_sums (
    namespace TEXT NOT NULL,
    day {integer} NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    mode TEXT NOT NULL,
    is_chained {integer} NOT NULL,
    has_id {integer} NOT NULL,
    reason TEXT NOT NULL,
    healed TEXT NOT NULL,
    pricing TEXT NOT NULL,
    responses {integer} NOT NULL,
    sent_blocks {integer} NOT NULL,
    sent_bytes {integer} NOT NULL,
    saved_blocks {integer} NOT NULL,
    saved_bytes {integer} NOT NULL,
    input_tokens {integer} NOT NULL,
    cached_tokens {integer} NOT NULL,
    output_tokens {integer} NOT NULL,
    reasoning_tokens {integer} NOT NULL,
    predictions {integer} NOT NULL,
    predicted_tokens {integer} NOT NULL,
    predicted_cached_tokens {integer} NOT NULL,
    cache_write_tokens {integer} NOT NULL,
    uncached_tokens {integer} NOT NULL,
    cache_savings {real} NOT NULL,
    cost {real} NOT NULL,
    PRIMARY KEY (
        namespace, day, provider, model, status, mode, is_chained, has_id, reason, healed, pricing
    )
){clustered};

-- Day -1 has the counts of all days.
CREATE TABLE latency_counts (
    namespace TEXT NOT NULL,
    day {integer} NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    is_first_token {integer} NOT NULL,
    seconds {real} NOT NULL,
    responses {integer} NOT NULL,
    PRIMARY KEY (namespace, day, provider, model, is_first_token, seconds)
){clustered};

-- Day -1 has the sums of all days.
CREATE TABLE conversation_sums (
    namespace TEXT NOT NULL,
    day {integer} NOT NULL,
    conversation {integer} NOT NULL,
    provider TEXT NOT NULL,
    model TEXT NOT NULL,
    responses {integer} NOT NULL,
    tokens {integer} NOT NULL,
    cost {real} NOT NULL,
    PRIMARY KEY (namespace, day, conversation, provider, model)
){clustered};

-- How many responses have an id, and how many were chained on it; an id that nothing was chained on ends a chain.
CREATE TABLE chain_links (
    namespace TEXT NOT NULL,
    scope {integer} NOT NULL,
    response_id TEXT NOT NULL,
    depth {integer} NOT NULL,
    day {integer} NOT NULL,
    responses {integer} NOT NULL,
    children {integer} NOT NULL,
    PRIMARY KEY (namespace, scope, response_id)
){clustered};

CREATE INDEX chain_ends ON chain_links (namespace, day, depth, responses) WHERE children = 0 AND depth > 0;

CREATE INDEX responses_by_time ON responses (created_at);

CREATE INDEX nodes_by_start ON nodes (parent) WHERE parent > 0 AND (branch = id OR kept = length);

CREATE INDEX conversations_forked ON conversations (namespace) WHERE forked_from IS NOT NULL;

CREATE INDEX conversations_by_time ON conversations (namespace, updated_at);

CREATE INDEX responses_failed ON responses (conversation)
WHERE status NOT IN ('completed', 'lost', 'cancelled');
