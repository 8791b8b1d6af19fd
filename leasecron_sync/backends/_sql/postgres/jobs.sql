SELECT j.owed_from_ms, u.unsettled,
  j.name, r.format, r.scheduled_ms, r.state, r.token, r.attempt, r.failures, r.hand_overs,
  r.holder, r.decision_id, r.until_ms, r.lease_ms, r.max_attempts, r.overlap, r.takeover_ms,
  r.claimed_ms, r.settled_ms, r.reason
FROM {schema}.{prefix}space s
  JOIN {schema}.{prefix}job j ON j.space_id = s.id
  CROSS JOIN LATERAL (
    SELECT count(*) AS unsettled FROM {schema}.{prefix}run x WHERE x.unsettled_job_id = j.id
  ) u
  LEFT JOIN LATERAL (
    SELECT * FROM {schema}.{prefix}run x WHERE x.job_id = j.id
    ORDER BY x.scheduled_ms DESC
    LIMIT 1
  ) r ON true
WHERE s.name = %(space)s
ORDER BY j.name
LIMIT %(limit)s
