SELECT j.name, r.format, r.scheduled_ms, r.state, r.token, r.attempt, r.failures, r.hand_overs,
  r.holder, r.decision_id, r.until_ms, r.lease_ms, r.max_attempts, r.overlap, r.takeover_ms,
  r.claimed_ms, r.settled_ms, r.reason
FROM (
  (
    SELECT x.* FROM {schema}.{prefix}run x
    WHERE x.settled_ms IS NOT NULL
      AND x.space_id = (SELECT s.id FROM {schema}.{prefix}space s WHERE s.name = %(space)s)
    ORDER BY x.scheduled_ms DESC
    FETCH FIRST %(limit)s ROWS WITH TIES
  )
  UNION ALL
  SELECT x.*
  FROM {schema}.{prefix}space s
    JOIN {schema}.{prefix}job j ON j.space_id = s.id
    JOIN {schema}.{prefix}run x ON x.unsettled_job_id = j.id
  WHERE s.name = %(space)s
) r
  JOIN {schema}.{prefix}job j ON j.id = r.job_id
ORDER BY r.scheduled_ms DESC, j.name
LIMIT %(limit)s
