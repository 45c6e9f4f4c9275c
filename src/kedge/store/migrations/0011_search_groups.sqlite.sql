-- Why: SQLite overwrites deleted terms only by rewriting a full-text table, so that the cost of every deletion
-- grew with the store. Now each group of blocks has a table of its own (texts_0, texts_1, …), which is created
-- when it is first needed, and this table has the numbers of the indexed blocks. The next search builds them.

DROP TABLE texts;

DELETE FROM indexed;

CREATE TABLE texts (
    rowid INTEGER PRIMARY KEY
);
