-- Notes since when the scheduled times of each job are owed. The arguments are as for claims.
--
-- "unreadable" says why the record of a job is left as it is.
CREATE OR REPLACE FUNCTION {schema}.{prefix}register_v1(
  p_space text, p_now_ms bigint, p_jobs text[], p_ends integer[], p_job text[],
  p_fingerprint text[]
) RETURNS TABLE (
  pos integer, owed_from_ms bigint, newest_ms bigint, store_ms bigint, store_id text,
  unreadable text
)
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
#variable_conflict use_column
DECLARE
  v_format CONSTANT integer := 1;
  v_former_schedule_ms CONSTANT bigint := 600000;
  v_former_schedules CONSTANT bigint := 8;
  v_space_id bigint;
  v_store_id text;
  v_first integer := 1;
  v_last integer;
  v_now_ms bigint;
BEGIN
  SELECT m.value INTO STRICT v_store_id FROM {schema}.{prefix}meta m WHERE m.name = 'store_id';
  v_space_id := {schema}.{prefix}meet_v1(p_space, p_jobs);
  PERFORM FROM unnest(p_jobs) AS n (name) CROSS JOIN LATERAL (
    SELECT FROM {schema}.{prefix}job x
    WHERE x.space_id = v_space_id AND x.name = n.name FOR UPDATE
  ) j;
  v_now_ms := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));

  FOREACH v_last IN ARRAY p_ends LOOP
    RETURN QUERY
    WITH seen AS (
      SELECT (v_first - 1 + c.pos)::integer AS pos, c.fingerprint, j.ctid AS place,
        j.owed_from_ms, j.format, j.fingerprint AS known, j.former, n.newest_ms,
        CASE
          WHEN j.pruned_to_ms <= v_now_ms THEN j.pruned_to_ms
          -- The newest of it that does not lie ahead of the clock.
          ELSE (
            SELECT max(least(p.last_ms, v_now_ms))
            FROM unnest(j.pruned_first_ms, j.pruned_last_ms) AS p (first_ms, last_ms)
            WHERE p.first_ms <= v_now_ms
          )
        END AS pruned_ms
      FROM unnest(p_job[v_first : v_last], p_fingerprint[v_first : v_last])
          WITH ORDINALITY AS c (job, fingerprint, pos)
        CROSS JOIN LATERAL (
          SELECT x.ctid, x.* FROM {schema}.{prefix}job x
          WHERE x.space_id = v_space_id AND x.name = c.job LIMIT 1
        ) j
        LEFT JOIN LATERAL (
          SELECT r.scheduled_ms AS newest_ms FROM {schema}.{prefix}run r
          WHERE r.job_id = j.id AND r.scheduled_ms <= v_now_ms
          ORDER BY r.scheduled_ms DESC
          LIMIT 1
        ) n ON true
    ),
    judged AS (
      SELECT s.*,
        s.format > v_format AS unreadable,
        s.owed_from_ms IS NOT NULL AND s.known <> s.fingerprint AS changed,
        CASE
          WHEN s.owed_from_ms IS NULL THEN v_now_ms
          WHEN s.known = s.fingerprint THEN least(s.owed_from_ms, v_now_ms)
          -- A definition that was displaced lately keeps its date. In both directions: one displaced
          -- under a clock that was far ahead is not recent for years.
          ELSE least(v_now_ms, (
            SELECT (f.value ->> 1)::bigint
            FROM jsonb_array_elements(s.former) WITH ORDINALITY AS f (value, place)
            WHERE f.value ->> 0 = s.fingerprint
              AND abs(v_now_ms - (f.value ->> 2)::bigint) < v_former_schedule_ms
            ORDER BY f.place
            LIMIT 1
          ))
        END AS owed_now_ms
      FROM seen s
    ),
    written AS (
      UPDATE {schema}.{prefix}job j SET
        owed_from_ms = d.owed_now_ms,
        fingerprint = d.fingerprint,
        former = CASE WHEN d.changed THEN (
          SELECT jsonb_agg(kept.value ORDER BY kept.place) FROM (
            SELECT jsonb_build_array(d.known, d.owed_from_ms, v_now_ms) AS value, 0 AS place
            UNION ALL
            (
              SELECT f.value, f.place
              FROM jsonb_array_elements(d.former) WITH ORDINALITY AS f (value, place)
              WHERE abs(v_now_ms - (f.value ->> 2)::bigint) < v_former_schedule_ms
                AND f.value ->> 0 NOT IN (d.known, d.fingerprint)
              ORDER BY f.place
              LIMIT v_former_schedules - 1
            )
          ) kept
        ) ELSE d.former END
      FROM judged d
      WHERE j.ctid = d.place AND NOT d.unreadable AND (
        d.owed_from_ms IS DISTINCT FROM d.owed_now_ms OR d.known <> d.fingerprint
      )
    )
    SELECT d.pos,
      CASE WHEN d.unreadable THEN v_now_ms ELSE d.owed_now_ms END,
      CASE WHEN NOT d.unreadable THEN greatest(d.newest_ms, d.pruned_ms) END,
      v_now_ms, v_store_id,
      CASE WHEN d.unreadable THEN format('the job has format %s', d.format) END
    FROM judged d;
    v_first := v_last + 1;
  END LOOP;
END
$body$;
