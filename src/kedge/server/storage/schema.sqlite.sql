-- The tables of the server in SQLite. A change here raises SCHEMA_VERSION in database.py.

CREATE TABLE nodes (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    parent INTEGER,
    barrier INTEGER NOT NULL,     -- holds a compaction: children see nothing before it
    tokens INTEGER NOT NULL,      -- of this node's own items, as a model sees them
    status TEXT,                  -- of the response; NULL where there is none, or none any more
    expires_at REAL,              -- likewise
    conversation TEXT,            -- to which the items were added
    input BLOB NOT NULL,          -- JSON array of items
    output BLOB NOT NULL,         -- JSON array of items
    asked BLOB,                   -- the response as JSON: what its request decided
    became BLOB,                  -- the response as JSON: what became of it
    namespace TEXT NOT NULL DEFAULT '',  -- of the user who added it; empty for the administrator
    owner TEXT,                   -- the server that generates the response, if there are several
    request BLOB,                 -- the body of the request, where it may be needed again
    idempotency_key TEXT,         -- which the client sent with the request
    background INTEGER NOT NULL DEFAULT 0  -- whether its client does not wait for the response
);

CREATE UNIQUE INDEX nodes_idempotency ON nodes (namespace, idempotency_key)
WHERE idempotency_key IS NOT NULL;

CREATE INDEX nodes_parent ON nodes (parent) WHERE parent IS NOT NULL;

CREATE INDEX nodes_expiry ON nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    node INTEGER,
    namespace TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;

CREATE INDEX conversations_node ON conversations (node) WHERE node IS NOT NULL;

CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
