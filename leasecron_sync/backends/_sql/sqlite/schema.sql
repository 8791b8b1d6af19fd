-- Store format 1. Every name starts with leasecron_, so that the file may hold other tables.
-- leasecron_meta keeps its name and columns in every format: by it an older version, which may be at
-- work while a newer one changes the rest, sees in each of its transactions that it has to end.
CREATE TABLE IF NOT EXISTS leasecron_meta (
  name  TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

-- A table that is gone took its records along: what is made now is another store.
DELETE FROM leasecron_meta WHERE name = 'store_id' AND 4 > (
  SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN (
    'leasecron_space', 'leasecron_job', 'leasecron_run', 'leasecron_pruned'
  )
);

CREATE TABLE IF NOT EXISTS leasecron_space (
  id   INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE
);

CREATE TABLE IF NOT EXISTS leasecron_job (
  id           INTEGER PRIMARY KEY,
  space_id     INTEGER NOT NULL,
  name         TEXT NOT NULL,
  last_token   INTEGER NOT NULL,
  pruned_to_ms INTEGER,
  owed_from_ms INTEGER,
  fingerprint  TEXT NOT NULL,
  former       TEXT NOT NULL,
  UNIQUE (space_id, name)
);

CREATE TABLE IF NOT EXISTS leasecron_run (
  job_id       INTEGER NOT NULL,
  scheduled_ms INTEGER NOT NULL,
  space_id     INTEGER NOT NULL,
  format       INTEGER NOT NULL,
  state        TEXT NOT NULL,
  token        INTEGER NOT NULL,
  attempt      INTEGER NOT NULL,
  failures     INTEGER NOT NULL,
  hand_overs   INTEGER NOT NULL,
  holder       TEXT NOT NULL,
  decision_id  TEXT NOT NULL,
  until_ms     INTEGER NOT NULL,
  lease_ms     INTEGER NOT NULL,
  max_attempts INTEGER NOT NULL,
  overlap      INTEGER NOT NULL,
  takeover_ms  INTEGER NOT NULL,
  claimed_ms   INTEGER,
  settled_ms   INTEGER,
  reason       TEXT NOT NULL,
  PRIMARY KEY (job_id, scheduled_ms)
) WITHOUT ROWID;

-- Which scheduled times were pruned, in a few spans.
CREATE TABLE IF NOT EXISTS leasecron_pruned (
  job_id   INTEGER NOT NULL,
  first_ms INTEGER NOT NULL,
  last_ms  INTEGER NOT NULL,
  PRIMARY KEY (job_id, first_ms)
) WITHOUT ROWID;

-- The few unsettled runs, found without looking at the settled ones.
CREATE INDEX IF NOT EXISTS leasecron_run_unsettled
  ON leasecron_run (space_id, job_id, until_ms) WHERE settled_ms IS NULL;

-- For pruning and for the history of all jobs.
CREATE INDEX IF NOT EXISTS leasecron_run_time ON leasecron_run (space_id, scheduled_ms);
