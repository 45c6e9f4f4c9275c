-- Why: a caller that still held a deleted conversation could leave rows behind; they go. PostgreSQL
-- never gives a number twice. Nodes get a checksum, so that verify detects a change in any column.

ALTER TABLE nodes ADD COLUMN checksum BYTEA;

DELETE FROM tags WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM claims WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM incidents WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM tool_runs WHERE conversation NOT IN (SELECT number FROM conversations);
DELETE FROM exchanges WHERE conversation NOT IN (SELECT number FROM conversations);
