SELECT %(job)s, r.format, r.scheduled_ms, r.state, r.token, r.attempt, r.failures, r.hand_overs,
  r.holder, r.decision_id, r.until_ms, r.lease_ms, r.max_attempts, r.overlap, r.takeover_ms,
  r.claimed_ms, r.settled_ms, r.reason
FROM {schema}.{prefix}run r
WHERE r.job_id = (
  SELECT j.id
  FROM {schema}.{prefix}space s JOIN {schema}.{prefix}job j ON j.space_id = s.id
  WHERE s.name = %(space)s AND j.name = %(job)s
)
ORDER BY r.scheduled_ms DESC
LIMIT %(limit)s
