-- Why: several users share a store, and none sees what belongs to another. A conversation belongs to a namespace, and
-- ids are unique in their namespace. Rows of earlier versions belong to the default namespace, whose name is empty:
-- the administrator's. Tokens and sessions are stored as hashes, so reading the database gives no access. Counts of
-- requests and tokens are rows, so that limits hold for all processes together.

ALTER TABLE conversations ADD COLUMN namespace TEXT NOT NULL DEFAULT '';

ALTER TABLE conversations DROP CONSTRAINT conversations_id_key;

CREATE UNIQUE INDEX conversations_by_id ON conversations (namespace, id);

ALTER TABLE proxied_requests ADD COLUMN namespace TEXT NOT NULL DEFAULT '';

CREATE TABLE access_tokens (
    name TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    hash BYTEA NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    requests_per_minute BIGINT,
    tokens_per_minute BIGINT,
    created_at DOUBLE PRECISION NOT NULL
);

CREATE TABLE access_sessions (
    hash BYTEA PRIMARY KEY,
    token TEXT NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL
);

CREATE INDEX access_sessions_by_token ON access_sessions (token);

CREATE TABLE access_counts (
    token TEXT PRIMARY KEY,
    minute BIGINT NOT NULL,
    requests BIGINT NOT NULL,
    tokens BIGINT NOT NULL
);
