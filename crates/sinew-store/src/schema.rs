//! Name, format and tables of the index.

/// File of the index, in the store's directory.
pub(crate) const FILE_NAME: &str = "index.sqlite";

/// Format version, stored in `PRAGMA user_version`. An index of another format is refused.
pub(crate) const FORMAT: i64 = 7;

/// Schema of the index. Any change of this text creates another format. `episodes.step` is the number of the
/// draw. `facets` contains further properties for filters.
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
CREATE INDEX episodes_kind ON episodes (task_kind);
CREATE INDEX episodes_turns ON episodes (turns);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    batch TEXT NOT NULL UNIQUE,
    step INTEGER NOT NULL,
    fence INTEGER NOT NULL,             -- number of the owner
    episodes TEXT NOT NULL,             -- JSON array
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL,
    sum INTEGER NOT NULL DEFAULT 0
);
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
