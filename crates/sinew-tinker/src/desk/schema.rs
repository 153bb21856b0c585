//! Name, format and tables of the journal.

/// File of the journal, in the state folder.
pub(super) const FILE_NAME: &str = "journal.sqlite";

/// Format version, stored in `PRAGMA user_version`. A journal of another format is refused.
pub(super) const FORMAT: i64 = 1;

/// Schema of the journal. Any change of this text creates another format. Times are milliseconds since 1970
/// (UTC). Blobs without a comment are MessagePack.
pub(super) const SCHEMA: &str = "
CREATE TABLE sessions (
    session TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    about BLOB NOT NULL,
    finish BLOB                         -- null: it takes commands
);
CREATE INDEX sessions_tenant ON sessions (tenant, created_ms);
CREATE TABLE models (
    model TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    last_ms INTEGER NOT NULL,           -- of the last command
    spec BLOB NOT NULL,
    next INTEGER NOT NULL,              -- seq of the command that runs next; 0: it is being made
    covered INTEGER NOT NULL,           -- the live checkpoint holds the effects of commands below this seq
    steps INTEGER NOT NULL,             -- optimizer steps
    saves INTEGER NOT NULL,             -- checkpoints for sampling: the version of the newest
    live TEXT,                          -- folder of the live checkpoint; null: the weights at the start
    live_bytes INTEGER NOT NULL,
    save_bytes INTEGER NOT NULL,        -- of its largest checkpoint, by which the next is estimated
    ended TEXT,                         -- why it takes no commands
    corrupted INTEGER NOT NULL
);
CREATE INDEX models_tenant ON models (tenant, created_ms);
CREATE INDEX models_session ON models (session);
CREATE TABLE commands (
    place INTEGER PRIMARY KEY AUTOINCREMENT,    -- order of arrival
    request TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    model TEXT,                         -- null: a sample request
    source TEXT,                        -- checkpoint of a sample request; null: the base model
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    digest BLOB NOT NULL,               -- BLAKE3 of the command
    cost INTEGER NOT NULL,              -- tokens, or sequences of a sample request
    bytes INTEGER NOT NULL,             -- of payload and result
    replay INTEGER NOT NULL DEFAULT 0,  -- whether its effect is in memory only, until a live checkpoint
    submitted_ms INTEGER NOT NULL,
    done_ms INTEGER,                    -- null: it waits or runs
    ended INTEGER,                      -- order of the ends, never used twice
    failed INTEGER NOT NULL DEFAULT 0,
    retrieved_ms INTEGER,
    -- Last, so that other columns are read without them.
    payload BLOB,                       -- the command, zstd; null: it is not needed any more
    result BLOB                         -- the outcome, zstd
);
CREATE INDEX commands_model ON commands (model, seq);
CREATE INDEX commands_waiting ON commands (place) WHERE done_ms IS NULL;
CREATE INDEX commands_done ON commands (done_ms) WHERE done_ms IS NOT NULL;
CREATE INDEX commands_tenant ON commands (tenant);
CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY,              -- tinker://...
    model TEXT NOT NULL,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    named INTEGER NOT NULL,             -- whether a client gave the name
    folder TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    used_ms INTEGER NOT NULL,           -- of the last sample
    expires_ms INTEGER,
    base_model TEXT NOT NULL,
    lora BLOB,                          -- null: all weights
    metadata BLOB NOT NULL,
    version INTEGER NOT NULL
);
CREATE INDEX checkpoints_model ON checkpoints (model, created_ms);
CREATE INDEX checkpoints_tenant ON checkpoints (tenant, created_ms);
CREATE INDEX checkpoints_expiry ON checkpoints (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE samplers (
    sampler TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT,                          -- checkpoint; null: the base model
    clients INTEGER NOT NULL
);
CREATE INDEX samplers_session ON samplers (session);
CREATE TABLE tokens (
    tenant TEXT NOT NULL,
    day INTEGER NOT NULL,               -- since 1970 (UTC)
    tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant, day)
);
";
