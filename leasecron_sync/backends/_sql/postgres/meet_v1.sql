-- Makes the namespace and those jobs that are missing; returns the id of the namespace.
CREATE OR REPLACE FUNCTION {schema}.{prefix}meet_v1(p_space text, p_jobs text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
DECLARE
  v_space_id bigint;
BEGIN
  FOR v_try IN 1 .. 100000 LOOP
    BEGIN
      INSERT INTO {schema}.{prefix}space (name) VALUES (p_space) ON CONFLICT (name) DO NOTHING;
      SELECT s.id INTO STRICT v_space_id FROM {schema}.{prefix}space s WHERE s.name = p_space;
      -- In key order, and before any row is locked: two that make the same jobs wait for each other.
      INSERT INTO {schema}.{prefix}job (space_id, name, format, last_token, fingerprint, former)
      SELECT v_space_id, n.name, 1, 0, '', '[]'
      FROM unnest(p_jobs) AS n (name)
        LEFT JOIN LATERAL (
          SELECT x.id FROM {schema}.{prefix}job x
          WHERE x.space_id = v_space_id AND x.name = n.name LIMIT 1
        ) j ON true
      WHERE j.id IS NULL
      ORDER BY n.name COLLATE "C"
      ON CONFLICT (space_id, name) DO NOTHING;
      RETURN v_space_id;
    EXCEPTION WHEN unique_violation THEN
      -- An id is taken: logical replication copies rows, and begins to count anew. Nobody may set
      -- the sequence who may only write rows, but each try takes it on.
      CONTINUE;
    END;
  END LOOP;
  RAISE unique_violation USING MESSAGE = 'the ids of {prefix}job or {prefix}space are taken';
END
$body$;
