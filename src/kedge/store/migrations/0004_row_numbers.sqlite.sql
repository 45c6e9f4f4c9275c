-- Why: SQLite gives a new row the number of a deleted one unless it is told not to. A caller that
-- still held a deleted conversation or node then wrote into another conversation. AUTOINCREMENT
-- never gives a number twice. Nodes get a checksum, so that verify detects a change in any column.
-- Rows that deleted conversations left behind go: another conversation could have inherited them.

CREATE TABLE new_conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
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
    updated_at REAL NOT NULL
);

INSERT INTO new_conversations
    (number, id, title, archived, tree, head, mode, retention, data, forked_from, forked_at,
    created_at, updated_at)
SELECT number, id, title, archived, tree, head, mode, retention, data, forked_from, forked_at,
    created_at, updated_at FROM conversations;

DROP TABLE conversations;

ALTER TABLE new_conversations RENAME TO conversations;

CREATE TABLE new_nodes (
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

INSERT INTO new_nodes
    (id, tree, branch, parent, conversation, kind, kept, length, depth, memory, created_at)
SELECT id, tree, branch, parent, conversation, kind, kept, length, depth, memory, created_at FROM nodes;

DROP TABLE nodes;

ALTER TABLE new_nodes RENAME TO nodes;

CREATE INDEX nodes_by_tree ON nodes (tree, branch);

DELETE FROM tags WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM claims WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM incidents WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM tool_runs WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM exchanges WHERE conversation NOT IN (SELECT number FROM conversations);
