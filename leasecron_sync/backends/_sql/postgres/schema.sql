-- Tables of store format 1. Everything here may be executed again, and by several at once under the
-- lock that comes before it.
CREATE TABLE IF NOT EXISTS {schema}.{prefix}meta (
  name  text PRIMARY KEY,
  value text NOT NULL
);

-- A table that is gone took its records along: what is made now is another store.
DELETE FROM {schema}.{prefix}meta
WHERE name = 'store_id'
  AND (to_regclass('{schema}.{prefix}space') IS NULL
    OR to_regclass('{schema}.{prefix}job') IS NULL
    OR to_regclass('{schema}.{prefix}run') IS NULL);

-- Names are compared byte by byte, in whatever language the database sorts.
CREATE TABLE IF NOT EXISTS {schema}.{prefix}space (
  id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL UNIQUE
);

-- Each grant writes its job's row: room in the page keeps the new version beside the old one.
-- pruned_first_ms and pruned_last_ms are the ends of the spans of scheduled times that were pruned,
-- rising; null as long as nothing was.
CREATE TABLE IF NOT EXISTS {schema}.{prefix}job (
  id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  space_id        bigint NOT NULL,
  name            text COLLATE "C" NOT NULL,
  format          integer NOT NULL,
  last_token      bigint NOT NULL,
  pruned_to_ms    bigint,
  pruned_first_ms bigint[],
  pruned_last_ms  bigint[],
  owed_from_ms    bigint,
  fingerprint     text NOT NULL,
  former          jsonb NOT NULL,
  UNIQUE (space_id, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- unsettled_job_id is the job's id while the run is unsettled, and null from then on. Only the index
-- over it can answer a question about it, so no plan reads the settled runs of a job to find the few
-- others. (A generated column would say the same, and cost a tenth of each command.)
CREATE TABLE IF NOT EXISTS {schema}.{prefix}run (
  job_id           bigint NOT NULL,
  scheduled_ms     bigint NOT NULL,
  space_id         bigint NOT NULL,
  format           integer NOT NULL,
  state            text NOT NULL,
  token            bigint NOT NULL,
  attempt          bigint NOT NULL,
  failures         bigint NOT NULL,
  hand_overs       bigint NOT NULL,
  holder           text NOT NULL,
  decision_id      text NOT NULL,
  until_ms         bigint NOT NULL,
  lease_ms         bigint NOT NULL,
  max_attempts     bigint NOT NULL,
  overlap          boolean NOT NULL,
  takeover_ms      bigint NOT NULL,
  claimed_ms       bigint,
  settled_ms       bigint,
  reason           text NOT NULL,
  unsettled_job_id bigint,
  PRIMARY KEY (job_id, scheduled_ms)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX IF NOT EXISTS {prefix}run_unsettled
  ON {schema}.{prefix}run (unsettled_job_id, scheduled_ms) WHERE unsettled_job_id IS NOT NULL;

-- For pruning and for the history of all jobs. It leaves the unsettled runs out, so that no plan
-- looks up a run by its key here, where its job comes last.
CREATE INDEX IF NOT EXISTS {prefix}run_settled
  ON {schema}.{prefix}run (space_id, scheduled_ms, job_id) WHERE settled_ms IS NOT NULL;
