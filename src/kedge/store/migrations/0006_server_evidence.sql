-- Why: what a server counted for a response is the base for judging the next one, and what is known about
-- the memory of a server should outlive a process.

ALTER TABLE responses ADD COLUMN counted TEXT;

CREATE TABLE evidence (
    name TEXT NOT NULL PRIMARY KEY,
    form TEXT NOT NULL,
    updated_at {real} NOT NULL
);
