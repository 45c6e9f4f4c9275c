-- Why: several users share a store, and none sees what belongs to another. A conversation belongs to a namespace, and
-- ids are unique in their namespace, so the table is made anew. Rows of earlier versions belong to the default
-- namespace, whose name is empty: the administrator's. Tokens and sessions are stored as hashes, so reading the
-- database gives no access. Counts of requests and tokens are rows, so that limits hold for all processes together.

CREATE TABLE new_conversations (
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
    namespace TEXT NOT NULL DEFAULT ''
);

INSERT INTO new_conversations
    (number, id, title, archived, tree, head, mode, retention, data, forked_from, forked_at,
    created_at, updated_at, ttl)
SELECT number, id, title, archived, tree, head, mode, retention, data, forked_from, forked_at,
    created_at, updated_at, ttl FROM conversations;

-- A number that was given once is never given again.
DELETE FROM sqlite_sequence WHERE name = 'new_conversations';

INSERT INTO sqlite_sequence (name, seq)
SELECT 'new_conversations', seq FROM sqlite_sequence WHERE name = 'conversations';

DROP TABLE conversations;

ALTER TABLE new_conversations RENAME TO conversations;

CREATE UNIQUE INDEX conversations_by_id ON conversations (namespace, id);

CREATE INDEX conversations_by_tree ON conversations (tree);

ALTER TABLE proxied_requests ADD COLUMN namespace TEXT NOT NULL DEFAULT '';

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
