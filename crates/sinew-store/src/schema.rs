//! Name, format and tables of the index.

/// File of the index, in the store's directory.
pub(crate) const FILE_NAME: &str = "index.sqlite";

/// `PRAGMA user_version`.
pub(crate) const FORMAT: i64 = 6;

/// The first format. Earlier ones are opened as they are, and what they lack is added: of this one [`LEDGER`]
/// and the facets.
pub(crate) const BEFORE_LEDGER: i64 = 2;

/// The last format without facets.
pub(crate) const BEFORE_FACETS: i64 = 3;

/// The last format with [`QUEUES`]. Opening a store for writing moves their rows into files of their own.
pub(crate) const WITH_QUEUES: i64 = 4;

/// The last format with [`NARROW_FACETS`]. Opening a store for writing makes them anew from the traces.
pub(crate) const BEFORE_CONTENT: i64 = 5;

/// What episodes are found by besides the columns of their row.
pub(crate) const FACETS: &str = "
CREATE TABLE facets (
    seq INTEGER PRIMARY KEY,            -- of the episode
    env TEXT NOT NULL, env_version TEXT,                -- null: unknown
    first_version INTEGER, last_version INTEGER,        -- null: nothing was sampled
    last_turn INTEGER NOT NULL,
    content BLOB NOT NULL,              -- equal for episodes that say the same
    sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX facets_env ON facets (env);
CREATE INDEX facets_turn ON facets (last_turn);
CREATE INDEX facets_version ON facets (last_version);
";

/// The facets of formats 4 and 5.
pub(crate) const NARROW_FACETS: &str = "
CREATE TABLE facets (
    seq INTEGER PRIMARY KEY,            -- of the episode
    env TEXT NOT NULL,
    first_version INTEGER, last_version INTEGER,        -- null: nothing was sampled
    last_turn INTEGER NOT NULL,
    sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX facets_env ON facets (env);
CREATE INDEX facets_turn ON facets (last_turn);
CREATE INDEX facets_version ON facets (last_version);
";

/// Indexes of episodes that format 4 added.
pub(crate) const EPISODE_INDEXES: &str = "
CREATE INDEX episodes_kind ON episodes (task_kind);
CREATE INDEX episodes_turns ON episodes (turns);
";

/// Tables that format 3 added to [`SCHEMA`].
pub(crate) const LEDGER: &str = "
CREATE TABLE scores (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    episode TEXT NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
    at_us INTEGER NOT NULL,
    value REAL, reason TEXT,            -- one of them is null
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL,
    sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX scores_episode ON scores (episode);
CREATE INDEX scores_segment ON scores (segment);
CREATE TABLE externals (
    external TEXT NOT NULL, episode TEXT NOT NULL,
    sum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (external, episode)
);
CREATE INDEX externals_episode ON externals (episode);
";

/// Any change of this text makes another format. `episodes.step` is the number of the draw; the name is of
/// trace formats 1 and 2, whose stores are opened as they are.
pub(crate) const SCHEMA: &str = "
CREATE TABLE segments (
    number INTEGER PRIMARY KEY,
    indexed INTEGER NOT NULL,           -- bytes whose records are in this file
    dead INTEGER NOT NULL DEFAULT 0,    -- gc moved its records, the file may go
    sum INTEGER NOT NULL DEFAULT 0      -- last of every table: checksum of the others, see `sums`
);
CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    episode TEXT NOT NULL UNIQUE,
    grp TEXT NOT NULL, task TEXT NOT NULL, task_kind TEXT NOT NULL,
    step INTEGER NOT NULL, purpose TEXT NOT NULL,
    reward REAL NOT NULL, success INTEGER NOT NULL, ended INTEGER NOT NULL,
    turns INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL,
    started_unix_s REAL, total_s REAL,
    segment INTEGER, offset INTEGER, bytes INTEGER,     -- null: removed by gc
    batch TEXT,
    sum INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX episodes_step ON episodes (step, purpose);
CREATE INDEX episodes_group ON episodes (grp);
CREATE INDEX episodes_segment ON episodes (segment);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    batch TEXT NOT NULL UNIQUE,
    step INTEGER NOT NULL,
    episodes TEXT NOT NULL,             -- JSON array
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL,
    sum INTEGER NOT NULL DEFAULT 0
);
";

/// Tables of formats up to [`WITH_QUEUES`].
pub(crate) const QUEUES: &str = "
CREATE TABLE queue_rows (
    queue TEXT NOT NULL, seq INTEGER NOT NULL, key TEXT NOT NULL,
    bytes INTEGER NOT NULL, state INTEGER NOT NULL, until_ms INTEGER NOT NULL,
    consumer TEXT NOT NULL, attempts INTEGER NOT NULL, lease INTEGER,
    payload BLOB,                       -- null: acked
    sum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, seq), UNIQUE (queue, key)
);
CREATE TABLE queues (
    queue TEXT PRIMARY KEY, next_lease INTEGER NOT NULL, sum INTEGER NOT NULL DEFAULT 0
);
";
