-- Why: to find what was said. The index holds the words of blocks under their numbers, and is brought
-- up to date by whoever searches, so that nothing is paid for it when something is said.

CREATE VIRTUAL TABLE texts USING fts5 (body, tokenize = 'unicode61 remove_diacritics 2');

CREATE TABLE indexed (
    name TEXT PRIMARY KEY,
    node INTEGER NOT NULL
);

CREATE TABLE heard (
    block INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    node INTEGER NOT NULL
);
