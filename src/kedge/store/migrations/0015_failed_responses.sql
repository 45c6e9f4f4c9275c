-- Why: for a list of more than two values SQLite builds a temporary table, here whenever a response was stored, to
-- decide whether it belongs to this index. Comparisons decide the same without one.

DROP INDEX responses_failed;

CREATE INDEX responses_failed ON responses (conversation)
WHERE status <> 'completed' AND status <> 'lost' AND status <> 'cancelled';
