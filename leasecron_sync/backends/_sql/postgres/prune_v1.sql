-- Settles as abandoned what lapsed or fell due too long ago, and deletes old settled runs, at most
-- p_limit of each. The last row tells how many were deleted, the others name what was abandoned.
CREATE OR REPLACE FUNCTION {schema}.{prefix}prune_v1(
  p_space text, p_now_ms bigint, p_older_than_ms bigint, p_limit bigint
) RETURNS TABLE (deleted bigint, job text, scheduled_ms bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
#variable_conflict use_column
DECLARE
  v_format CONSTANT integer := 1;
  v_pruned_spans CONSTANT bigint := 8;
  v_space_id bigint;
  v_now_ms bigint := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));
  v_before_ms bigint := v_now_ms - p_older_than_ms;
  v_jobs bigint[];
BEGIN
  SELECT s.id INTO v_space_id FROM {schema}.{prefix}space s WHERE s.name = p_space;
  SELECT array_agg(DISTINCT k.job_id) INTO v_jobs FROM (
    (
      SELECT j.id AS job_id
      FROM {schema}.{prefix}job j
        CROSS JOIN LATERAL (
          SELECT FROM {schema}.{prefix}run x
          WHERE x.unsettled_job_id = j.id AND x.until_ms < v_before_ms
          ORDER BY x.scheduled_ms
        ) r
      WHERE j.space_id = v_space_id
      LIMIT p_limit
    )
    UNION ALL
    (
      SELECT r.job_id FROM {schema}.{prefix}run r
      WHERE r.space_id = v_space_id AND r.scheduled_ms < v_before_ms
        AND r.settled_ms IS NOT NULL
      ORDER BY r.scheduled_ms, r.job_id
      LIMIT p_limit
    )
  ) k;
  -- Jobs before runs, and each in key order, as claims do.
  PERFORM FROM {schema}.{prefix}job j WHERE j.id = ANY (v_jobs) ORDER BY j.name FOR UPDATE;

  PERFORM FROM {schema}.{prefix}run r
  WHERE r.unsettled_job_id = ANY (v_jobs) AND r.until_ms < v_before_ms
  ORDER BY r.unsettled_job_id, r.scheduled_ms
  FOR UPDATE;
  RETURN QUERY
  WITH old AS (
    SELECT r.ctid AS place, r.scheduled_ms, j.name
    FROM {schema}.{prefix}job j
      CROSS JOIN LATERAL (
        SELECT x.ctid, x.* FROM {schema}.{prefix}run x
        WHERE x.unsettled_job_id = j.id AND x.until_ms < v_before_ms
          AND x.format <= v_format AND x.state IN ('running', 'waiting')
        ORDER BY x.scheduled_ms
      ) r
    WHERE j.id = ANY (v_jobs)
    LIMIT p_limit
  ),
  abandoned AS (
    UPDATE {schema}.{prefix}run r SET
      state = 'failed', decision_id = 'store', reason = 'abandoned', settled_ms = v_now_ms,
      unsettled_job_id = NULL,
      failures = r.failures + (r.state = 'running')::integer
    FROM old o WHERE r.ctid = o.place
  )
  SELECT NULL::bigint, o.name, o.scheduled_ms FROM old o ORDER BY o.scheduled_ms, o.name;

  RETURN QUERY
  WITH old AS (
    SELECT k.job_id, k.scheduled_ms, r.place
    FROM (
      SELECT l.job_id, l.scheduled_ms
      FROM (
        SELECT r.job_id, r.scheduled_ms FROM {schema}.{prefix}run r
        WHERE r.space_id = v_space_id AND r.scheduled_ms < v_before_ms
          AND r.settled_ms IS NOT NULL
        ORDER BY r.scheduled_ms, r.job_id
        LIMIT p_limit
      ) l
      WHERE l.job_id = ANY (v_jobs)
      ORDER BY l.job_id, l.scheduled_ms
    ) k
    -- Those are not waited for that somebody looks at just now, to renew or to settle once more:
    -- with locks on younger runs, from above, this could be a deadlock. The next call takes them.
    CROSS JOIN LATERAL (
      SELECT x.ctid AS place FROM {schema}.{prefix}run x
      WHERE x.job_id = k.job_id AND x.scheduled_ms = k.scheduled_ms FOR UPDATE SKIP LOCKED
    ) r
  ),
  of_jobs AS (
    SELECT n.job_id, n.newest_ms, x.place, x.pruned_first_ms, x.pruned_last_ms
    FROM (
      SELECT o.job_id, max(o.scheduled_ms) AS newest_ms FROM old o GROUP BY o.job_id
    ) n
    CROSS JOIN LATERAL (
      SELECT j.ctid AS place, j.pruned_first_ms, j.pruned_last_ms
      FROM {schema}.{prefix}job j WHERE j.id = n.job_id LIMIT 1
    ) x
  ),
  -- Of what was pruned and what is pruned now, what lies close together is one span, and of more
  -- than a few spans those are joined that have the smallest holes between them, the first of equal
  -- ones first. A hole is what lies between a time and all before it.
  pruned AS (
    SELECT b.job_id, p.first_ms, p.last_ms
    FROM of_jobs b CROSS JOIN LATERAL unnest(b.pruned_first_ms, b.pruned_last_ms) AS p (
      first_ms, last_ms
    )
    UNION ALL
    SELECT o.job_id, o.scheduled_ms, o.scheduled_ms FROM old o
  ),
  holes AS (
    SELECT p.*, p.first_ms - max(p.last_ms) OVER (
        PARTITION BY p.job_id ORDER BY p.first_ms, p.last_ms
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
      ) AS hole_ms
    FROM pruned p
  ),
  ranked AS (
    SELECT h.*,
      h.hole_ms > p_older_than_ms / 2 AND row_number() OVER (
        PARTITION BY h.job_id ORDER BY h.hole_ms DESC NULLS LAST, h.first_ms DESC
      ) < v_pruned_spans AS begins
    FROM holes h
  ),
  numbered AS (
    SELECT r.*, count(*) FILTER (WHERE r.begins) OVER (
        PARTITION BY r.job_id ORDER BY r.first_ms, r.last_ms
      ) AS number
    FROM ranked r
  ),
  spans AS (
    SELECT s.job_id, array_agg(s.first_ms ORDER BY s.first_ms) AS first_ms,
      array_agg(s.last_ms ORDER BY s.first_ms) AS last_ms
    FROM (
      SELECT n.job_id, min(n.first_ms) AS first_ms, max(n.last_ms) AS last_ms
      FROM numbered n GROUP BY n.job_id, n.number
    ) s
    GROUP BY s.job_id
  ),
  noted AS (
    UPDATE {schema}.{prefix}job j SET
      pruned_to_ms = greatest(j.pruned_to_ms, b.newest_ms),
      pruned_first_ms = s.first_ms,
      pruned_last_ms = s.last_ms
    FROM of_jobs b JOIN spans s ON s.job_id = b.job_id
    WHERE j.ctid = b.place
  ),
  gone AS (
    DELETE FROM {schema}.{prefix}run r USING old o WHERE r.ctid = o.place
  )
  SELECT count(*), NULL, NULL::bigint FROM old o;
END
$body$;
