-- Why: conversations that last. Blocks are stored once, under a hash of their whole JSON form, and
-- linked from places of a branch. A node is one step of a tree: it keeps the first blocks of its
-- parent's path and adds its own. Nodes that only append share a branch with their parent, so a path
-- of ten thousand nodes is read in one range. Forks are conversations on one tree.

CREATE TABLE conversations (
    number {serial},
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    archived {integer} NOT NULL,
    tree {integer} NOT NULL,
    head {integer} NOT NULL,
    mode TEXT,
    retention {real},
    data TEXT,
    forked_from TEXT,
    forked_at {integer},
    created_at {real} NOT NULL,
    updated_at {real} NOT NULL
);

CREATE TABLE tags (
    conversation {integer} NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (conversation, tag)
){clustered};

-- owner: the one conversation that uses the block; NULL once several do.
CREATE TABLE blocks (
    id {serial},
    hash {bytes} NOT NULL UNIQUE,
    owner {integer},
    body TEXT NOT NULL
);

CREATE TABLE links (
    branch {integer} NOT NULL,
    place {integer} NOT NULL,
    block {integer} NOT NULL,
    PRIMARY KEY (branch, place)
){clustered};

CREATE TABLE nodes (
    id {serial},
    tree {integer} NOT NULL,
    branch {integer} NOT NULL,
    parent {integer} NOT NULL,
    conversation {integer} NOT NULL,
    kind TEXT NOT NULL,
    kept {integer} NOT NULL,
    length {integer} NOT NULL,
    depth {integer} NOT NULL,
    memory TEXT,
    created_at {real} NOT NULL
);

CREATE INDEX nodes_by_tree ON nodes (tree, branch);

CREATE TABLE scopes (
    number {serial},
    name TEXT NOT NULL UNIQUE
);

-- A response has the number of the node that it made; a failed one made an empty node.
CREATE TABLE responses (
    node {integer} PRIMARY KEY,
    conversation {integer} NOT NULL,
    provider TEXT NOT NULL,
    scope {integer} NOT NULL,
    provider_response_id TEXT,
    model TEXT NOT NULL,
    mode TEXT NOT NULL,
    anchor TEXT,
    reason TEXT,
    healed TEXT,
    sent_blocks {integer} NOT NULL,
    sent_bytes {integer} NOT NULL,
    saved_blocks {integer} NOT NULL,
    saved_bytes {integer} NOT NULL,
    input_tokens {integer},
    cached_tokens {integer},
    output_tokens {integer},
    reasoning_tokens {integer},
    cost {real},
    first_token_seconds {real},
    seconds {real} NOT NULL,
    status TEXT NOT NULL,
    error TEXT,
    created_at {real} NOT NULL,
    expires_at {real},
    stored {integer} NOT NULL,
    digest {bytes},
    block_count {integer},
    depth {integer},
    root_created_at {real},
    barrier {integer},
    derived TEXT,
    lost_reason TEXT
);

CREATE INDEX responses_by_digest ON responses (digest, scope);

-- Idempotency: who runs the turn with this key, until when, and what came of it.
CREATE TABLE claims (
    conversation {integer} NOT NULL,
    key TEXT NOT NULL,
    about {bytes} NOT NULL,
    owner TEXT NOT NULL,
    lease_until {real} NOT NULL,
    asked {integer},
    answer {integer},
    PRIMARY KEY (conversation, key)
){clustered};
