-- Returns the known states of each span, by the position of the span.
CREATE OR REPLACE FUNCTION {schema}.{prefix}states_v1(
  p_space text, p_job text[], p_from_ms bigint[], p_to_ms bigint[]
) RETURNS TABLE (pos integer, scheduled_ms bigint, state text)
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT c.pos::integer, r.scheduled_ms, r.state
  FROM {schema}.{prefix}space s
    CROSS JOIN unnest(p_job, p_from_ms, p_to_ms) WITH ORDINALITY AS c (job, from_ms, to_ms, pos)
    CROSS JOIN LATERAL (
      SELECT x.id FROM {schema}.{prefix}job x
      WHERE x.space_id = s.id AND x.name = c.job LIMIT 1
    ) j
    CROSS JOIN LATERAL (
      SELECT x.scheduled_ms, x.state FROM {schema}.{prefix}run x
      WHERE x.job_id = j.id AND x.scheduled_ms BETWEEN c.from_ms AND c.to_ms
      ORDER BY x.scheduled_ms
    ) r
  WHERE s.name = p_space;
END
$body$;
