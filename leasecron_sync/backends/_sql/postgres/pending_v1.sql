-- Tells which runs of these jobs are claimable now, the oldest first. The first row names no run: it
-- tells the time until the next one, and whether there is a run that the asker does not hold.
CREATE OR REPLACE FUNCTION {schema}.{prefix}pending_v1(
  p_space text, p_now_ms bigint, p_jobs text[], p_asker text, p_limit bigint
) RETURNS TABLE (job text, scheduled_ms bigint, next_in_ms bigint, unsettled boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
#variable_conflict use_column
DECLARE
  v_format CONSTANT integer := 1;
  v_max_retry_delay_ms CONSTANT bigint := 300000;
  v_now_ms bigint := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));
BEGIN
  RETURN QUERY
  WITH
  seen AS (
    SELECT j.name AS job, r.scheduled_ms, r.until_ms, r.overlap,
      r.state = 'running' AND r.until_ms > v_now_ms AS live,
      r.state = 'running' AND r.until_ms <= v_now_ms AS lapsed,
      r.state = 'running' AND r.until_ms - v_now_ms > 2 * r.lease_ms AS overlong,
      r.state = 'waiting' AND (
        r.until_ms <= v_now_ms OR r.until_ms - v_now_ms > v_max_retry_delay_ms
      ) AS due,
      NOT (
        r.state = 'running' AND r.until_ms > v_now_ms AND r.holder = p_asker
      ) AS of_others
    FROM {schema}.{prefix}space s
      CROSS JOIN unnest(p_jobs) AS n (name)
      CROSS JOIN LATERAL (
        SELECT * FROM {schema}.{prefix}job x WHERE x.space_id = s.id AND x.name = n.name LIMIT 1
      ) j
      CROSS JOIN LATERAL (
        SELECT * FROM {schema}.{prefix}run x WHERE x.unsettled_job_id = j.id ORDER BY x.scheduled_ms
      ) r
    WHERE s.name = p_space AND r.format <= v_format AND r.state IN ('running', 'waiting')
  ),
  ranked AS (
    SELECT s.*,
      bool_or(s.live) OVER (PARTITION BY s.job) AS blocked,
      -- A lapsed run goes before a waiting one, which is deferred until the lapsed one is settled.
      row_number() OVER (
        PARTITION BY s.job, (s.lapsed OR s.due) AND NOT s.overlap
        ORDER BY s.lapsed DESC, s.scheduled_ms
      ) AS turn
    FROM seen s
  ),
  listed AS (
    SELECT k.job, k.scheduled_ms FROM ranked k
    WHERE k.overlong
      OR (k.lapsed OR k.due) AND (k.overlap OR NOT k.blocked AND k.turn = 1)
    ORDER BY k.scheduled_ms, k.job
    LIMIT p_limit
  )
  SELECT NULL, NULL::bigint, min(s.until_ms) FILTER (WHERE s.until_ms > v_now_ms) - v_now_ms,
    coalesce(bool_or(s.of_others), false)
  FROM seen s
  UNION ALL
  (SELECT l.job, l.scheduled_ms, NULL, NULL FROM listed l ORDER BY l.scheduled_ms, l.job);
END
$body$;
