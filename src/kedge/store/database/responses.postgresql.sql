-- The tables of responses in PostgreSQL; see responses.py. A change here raises the schema numbers of both
-- the server and the store.

CREATE TABLE kedge_server_nodes (
    id BIGINT PRIMARY KEY,
    key TEXT NOT NULL,
    parent BIGINT REFERENCES kedge_server_nodes,
    barrier BOOLEAN NOT NULL,
    tokens BIGINT NOT NULL,
    status TEXT,
    expires_at DOUBLE PRECISION,
    conversation TEXT,
    input BYTEA NOT NULL,
    output BYTEA NOT NULL,
    request_fields BYTEA,
    result_fields BYTEA,
    namespace TEXT NOT NULL DEFAULT '',
    owner TEXT,
    request BYTEA,
    idempotency_key TEXT,
    background BOOLEAN NOT NULL DEFAULT FALSE,
    attempts INTEGER NOT NULL DEFAULT 1
);

CREATE INDEX kedge_server_parent ON kedge_server_nodes (parent) WHERE parent IS NOT NULL;

CREATE INDEX kedge_server_expiry ON kedge_server_nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE INDEX kedge_server_unfinished ON kedge_server_nodes (owner) WHERE status IN ('in_progress', 'queued');

CREATE INDEX kedge_server_conversation ON kedge_server_nodes (conversation) WHERE conversation IS NOT NULL;

CREATE UNIQUE INDEX kedge_server_idempotency ON kedge_server_nodes (namespace, idempotency_key)
    WHERE idempotency_key IS NOT NULL;

CREATE TABLE kedge_server_conversations (
    id TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL,
    metadata BYTEA NOT NULL,
    node BIGINT REFERENCES kedge_server_nodes,
    namespace TEXT NOT NULL DEFAULT '',
    locked_by TEXT
);

CREATE INDEX kedge_server_end ON kedge_server_conversations (node) WHERE node IS NOT NULL;

CREATE TABLE kedge_server_facts (name TEXT PRIMARY KEY, value BYTEA NOT NULL);

CREATE TABLE kedge_server_replicas (id TEXT PRIMARY KEY, alive_until DOUBLE PRECISION NOT NULL);

CREATE TABLE kedge_server_events (
    node BIGINT NOT NULL REFERENCES kedge_server_nodes ON DELETE CASCADE,
    first BIGINT NOT NULL,
    last BIGINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    frames BYTEA NOT NULL,
    PRIMARY KEY (node, first)
);

-- The last number of a node that a server has reserved.
CREATE TABLE kedge_server_numbers (last BIGINT NOT NULL);

INSERT INTO kedge_server_numbers (last) VALUES (0);
