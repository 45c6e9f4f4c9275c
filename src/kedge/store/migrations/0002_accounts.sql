-- Why: to answer what went wrong and what took long. Healings, refusals and forgettings are incidents;
-- tools have times of their own; raw bodies are kept only by those who ask for it.

CREATE TABLE incidents (
    id {serial},
    conversation {integer} NOT NULL,
    node {integer} NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    scope {integer} NOT NULL,
    created_at {real} NOT NULL
);

CREATE TABLE tool_runs (
    id {serial},
    conversation {integer} NOT NULL,
    node {integer} NOT NULL,
    name TEXT NOT NULL,
    outcome TEXT NOT NULL,
    seconds {real} NOT NULL,
    created_at {real} NOT NULL
);

CREATE TABLE exchanges (
    id {serial},
    conversation {integer} NOT NULL,
    node {integer} NOT NULL,
    request {bytes} NOT NULL,
    reply {bytes} NOT NULL,
    status {integer},
    created_at {real} NOT NULL
);
