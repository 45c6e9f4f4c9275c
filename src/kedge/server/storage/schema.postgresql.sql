-- The tables of the server in PostgreSQL, without the prefix of their names. A change here raises SCHEMA_VERSION in
-- database.py. The sequence is increased by NUMBERS_PER_RESERVATION in postgres.py.

CREATE TABLE nodes (
    id BIGINT PRIMARY KEY,
    key TEXT NOT NULL,
    parent BIGINT REFERENCES nodes,
    barrier BOOLEAN NOT NULL,
    tokens BIGINT NOT NULL,
    status TEXT,
    expires_at DOUBLE PRECISION,
    conversation TEXT,
    input BYTEA NOT NULL,
    output BYTEA NOT NULL,
    asked BYTEA,
    became BYTEA,
    namespace TEXT NOT NULL DEFAULT '',
    owner TEXT,
    request BYTEA,
    idempotency_key TEXT,
    background BOOLEAN NOT NULL DEFAULT FALSE,
    attempts INTEGER NOT NULL DEFAULT 1
);

CREATE INDEX kedge_server_parent ON nodes (parent) WHERE parent IS NOT NULL;

CREATE INDEX kedge_server_expiry ON nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE INDEX kedge_server_unfinished ON nodes (owner) WHERE status IN ('in_progress', 'queued');

CREATE INDEX kedge_server_conversation ON nodes (conversation) WHERE conversation IS NOT NULL;

CREATE UNIQUE INDEX kedge_server_idempotency ON nodes (namespace, idempotency_key)
    WHERE idempotency_key IS NOT NULL;

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL,
    metadata BYTEA NOT NULL,
    node BIGINT REFERENCES nodes,
    namespace TEXT NOT NULL DEFAULT '',
    locked_by TEXT
);

CREATE INDEX kedge_server_end ON conversations (node) WHERE node IS NOT NULL;

CREATE TABLE facts (name TEXT PRIMARY KEY, value BYTEA NOT NULL);

CREATE TABLE kedge_server_replicas (id TEXT PRIMARY KEY, alive_until DOUBLE PRECISION NOT NULL);

CREATE TABLE kedge_server_events (
    node BIGINT NOT NULL REFERENCES nodes ON DELETE CASCADE,
    first BIGINT NOT NULL,
    last BIGINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    frames BYTEA NOT NULL,
    PRIMARY KEY (node, first)
);

CREATE SEQUENCE kedge_server_numbers INCREMENT 64;
