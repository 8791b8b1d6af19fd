-- Extends each lease whose token is still its run's; returns the positions of those.
CREATE OR REPLACE FUNCTION {schema}.{prefix}renew_v1(
  p_space text, p_now_ms bigint, p_lease_ms bigint, p_job text[], p_scheduled_ms bigint[],
  p_token bigint[]
) RETURNS SETOF integer
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
DECLARE
  v_format CONSTANT integer := 1;
  v_space_id bigint;
  v_now_ms bigint;
BEGIN
  SELECT s.id INTO v_space_id FROM {schema}.{prefix}space s WHERE s.name = p_space;
  PERFORM FROM (
    SELECT j.id AS job_id, l.scheduled_ms
    FROM unnest(p_job, p_scheduled_ms) AS l (job, scheduled_ms)
      CROSS JOIN LATERAL (
        SELECT x.id FROM {schema}.{prefix}job x
        WHERE x.space_id = v_space_id AND x.name = l.job LIMIT 1
      ) j
    ORDER BY j.id, l.scheduled_ms
  ) k
  CROSS JOIN LATERAL (
    SELECT FROM {schema}.{prefix}run x
    WHERE x.job_id = k.job_id AND x.scheduled_ms = k.scheduled_ms FOR UPDATE
  ) r;
  v_now_ms := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));
  RETURN QUERY
  WITH held AS (
    SELECT l.pos::integer AS pos, r.place
    FROM unnest(p_job, p_scheduled_ms, p_token) WITH ORDINALITY AS l (
        job, scheduled_ms, token, pos
      )
      CROSS JOIN LATERAL (
        SELECT x.id FROM {schema}.{prefix}job x
        WHERE x.space_id = v_space_id AND x.name = l.job LIMIT 1
      ) j
      CROSS JOIN LATERAL (
        SELECT x.ctid AS place, x.token, x.state, x.format FROM {schema}.{prefix}run x
        WHERE x.job_id = j.id AND x.scheduled_ms = l.scheduled_ms LIMIT 1
      ) r
    WHERE r.token = l.token AND r.state = 'running' AND r.format <= v_format
  ),
  renewed AS (
    UPDATE {schema}.{prefix}run r SET until_ms = v_now_ms + p_lease_ms
    FROM held h WHERE r.ctid = h.place
  )
  SELECT h.pos FROM held h;
END
$body$;
