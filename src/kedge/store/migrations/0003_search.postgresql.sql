-- Why: to find what was said. The index holds the words of blocks under their numbers, and is brought
-- up to date by whoever searches, so that nothing is paid for it when something is said.

CREATE TABLE texts (
    rowid BIGINT PRIMARY KEY,
    body TEXT NOT NULL,
    words TSVECTOR GENERATED ALWAYS AS (to_tsvector('simple', body)) STORED
);

CREATE INDEX texts_by_words ON texts USING GIN (words);

CREATE TABLE indexed (
    name TEXT PRIMARY KEY,
    node BIGINT NOT NULL
);

CREATE TABLE heard (
    block BIGINT PRIMARY KEY,
    conversation BIGINT NOT NULL,
    node BIGINT NOT NULL
);
