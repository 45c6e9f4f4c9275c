-- The tables of responses in SQLite; see responses.py. A change here raises the schema numbers of both
-- the server and the store.

CREATE TABLE kedge_server_nodes (
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
    request_fields BLOB,          -- JSON object: the fields of the response that its request decided
    result_fields BLOB,           -- JSON object: its other fields, except for the output
    namespace TEXT NOT NULL DEFAULT '',  -- of the user who added it; empty for the administrator
    owner TEXT,                   -- the server that generates the response, if there are several
    request BLOB,                 -- the body of the request, where it may be needed again
    idempotency_key TEXT,         -- which the client sent with the request
    background INTEGER NOT NULL DEFAULT 0  -- whether its client does not wait for the response
);

CREATE UNIQUE INDEX kedge_server_nodes_idempotency ON kedge_server_nodes (namespace, idempotency_key)
WHERE idempotency_key IS NOT NULL;

CREATE INDEX kedge_server_nodes_parent ON kedge_server_nodes (parent) WHERE parent IS NOT NULL;

CREATE INDEX kedge_server_nodes_expiry ON kedge_server_nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE kedge_server_conversations (
    id TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    node INTEGER,
    namespace TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;

CREATE INDEX kedge_server_conversations_node ON kedge_server_conversations (node) WHERE node IS NOT NULL;

CREATE TABLE kedge_server_facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

-- The last number of a node that a server has reserved.
CREATE TABLE kedge_server_numbers (last INTEGER NOT NULL);

INSERT INTO kedge_server_numbers (last) VALUES (0);
