-- Decides claims by the table in docs/protocol.rst, section 5; "line" names what fits there.
--
-- The arrays from p_job on hold an element for each claim. Claims come in rounds, each with at most
-- one claim of a job, so that those of one job are decided in turn, each on what the one before it
-- wrote; p_ends are the positions at which the rounds end. p_jobs are the jobs of all claims, in key
-- order, and p_strict tells of each whether a claim of it forbids overlap.
--
-- A row with the line "beside" belongs to a claim that was granted: it names another run that this
-- claim settled. Rows with the line "unknown job" are the only ones: nothing was decided, since those
-- jobs have to be made first. Made here, under locks on others, they could lead to a deadlock.
--
-- In all functions the plans are made once for a session, also while the tables are still empty: by
-- the indexes. Where rows are looked up one by one, LATERAL with a LIMIT or an ORDER BY leaves no
-- other way to do it, and OFFSET 0 keeps an expression from being put in wherever it is named. A row
-- that is locked stays where it is, so "place" finds it again.
CREATE OR REPLACE FUNCTION {schema}.{prefix}claim_v1(
  p_space text, p_now_ms bigint, p_jobs text[], p_strict boolean[], p_ends integer[], p_job text[],
  p_scheduled_ms bigint[], p_due_ms bigint[], p_holder text[], p_decision_id text[],
  p_lease_ms bigint[], p_max_attempts bigint[], p_on_overlap text[], p_max_age_ms bigint[],
  p_takeover_ms bigint[]
) RETURNS TABLE (
  pos integer, line text, token bigint, attempt bigint, failures bigint, ms bigint, state text,
  reason text, own boolean, others boolean
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
  v_max_retry_delay_ms CONSTANT bigint := 300000;
  v_space_id bigint;
  v_job_ids bigint[];
  v_strict boolean[];
  v_locked text[];
  v_first integer := 1;
  v_last integer;
  v_has_stale boolean;
  v_beside_stale integer[];
  v_now_ms bigint;
  v_job {schema}.{prefix}job%ROWTYPE;
BEGIN
  -- What most claims are: one by itself, on time, of a run without a record, while none of its job is
  -- unsettled. That is the line "first", and the statements for many claims, which would find the
  -- same, take several times as long. Whatever else it is, nothing is written here, and those decide.
  IF cardinality(p_job) = 1 THEN
    SELECT j.* INTO v_job
    FROM {schema}.{prefix}space s JOIN {schema}.{prefix}job j ON j.space_id = s.id
    WHERE s.name = p_space AND j.name = p_job[1]
    FOR UPDATE OF j;
    v_now_ms := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));
    IF v_job.format <= v_format
      AND v_now_ms BETWEEN p_due_ms[1] AND p_due_ms[1] + p_max_age_ms[1]
      AND (p_scheduled_ms[1] <= v_job.pruned_to_ms) IS NOT TRUE
    THEN
      v_job.last_token := greatest(v_job.last_token + 1, v_now_ms);
      WITH made AS (
        INSERT INTO {schema}.{prefix}run (
          job_id, scheduled_ms, space_id, format, state, token, attempt, failures, hand_overs,
          holder, decision_id, until_ms, lease_ms, max_attempts, overlap, takeover_ms, claimed_ms,
          reason, unsettled_job_id
        )
        SELECT v_job.id, p_scheduled_ms[1], v_job.space_id, v_format, 'running', v_job.last_token,
          1, 0, 0, p_holder[1], p_decision_id[1], v_now_ms + p_lease_ms[1], p_lease_ms[1],
          p_max_attempts[1], p_on_overlap[1] = 'allow', p_takeover_ms[1], v_now_ms, '', v_job.id
        WHERE NOT EXISTS (
          SELECT FROM {schema}.{prefix}run x WHERE x.unsettled_job_id = v_job.id LIMIT 1
        )
        ON CONFLICT DO NOTHING
        RETURNING job_id
      )
      UPDATE {schema}.{prefix}job j SET last_token = v_job.last_token
      FROM made m WHERE j.id = m.job_id;
      IF FOUND THEN
        pos := 1;
        line := 'first';
        token := v_job.last_token;
        attempt := 1;
        failures := 0;
        ms := p_lease_ms[1];
        RETURN NEXT;
        RETURN;
      END IF;
    END IF;
  END IF;

  SELECT s.id INTO v_space_id FROM {schema}.{prefix}space s WHERE s.name = p_space;
  -- The lock on the jobs comes first, in a statement of its own: what is read below is read in
  -- snapshots from after it, so nobody else grants a run of these jobs meanwhile.
  SELECT array_agg(j.id ORDER BY j.id), array_agg(n.strict ORDER BY j.id), array_agg(n.name)
  INTO v_job_ids, v_strict, v_locked
  FROM unnest(p_jobs, p_strict) AS n (name, strict) CROSS JOIN LATERAL (
    SELECT x.id FROM {schema}.{prefix}job x
    WHERE x.space_id = v_space_id AND x.name = n.name FOR UPDATE
  ) j;

  IF cardinality(v_locked) IS DISTINCT FROM cardinality(p_jobs) THEN
    v_now_ms := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));
    RETURN QUERY
    SELECT c.pos::integer, 'unknown job', NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint,
      NULL, NULL, NULL::boolean, NULL::boolean
    FROM unnest(p_job, p_due_ms, p_max_age_ms) WITH ORDINALITY AS c (job, due_ms, max_age_ms, pos)
    WHERE (c.job = ANY (v_locked)) IS NOT TRUE
      AND v_now_ms BETWEEN c.due_ms AND c.due_ms + c.max_age_ms;
    IF FOUND THEN
      RETURN;
    END IF;
    -- What is left of them is too early or too old, and decided without a look at a job that
    -- somebody makes just now: it is not locked.
    p_job := ARRAY(
      SELECT CASE WHEN c.job = ANY (v_locked) THEN c.job END
      FROM unnest(p_job) WITH ORDINALITY AS c (job, pos) ORDER BY c.pos
    );
  END IF;

  -- Holders renew and settle under the lock on their run alone. The unsettled runs that may be
  -- written here are locked as well, so that what is decided about them still holds then.
  PERFORM FROM unnest(v_job_ids, v_strict) AS n (job_id, strict) CROSS JOIN LATERAL (
    SELECT FROM {schema}.{prefix}run x
    WHERE x.unsettled_job_id = n.job_id
      AND (n.strict OR x.scheduled_ms = ANY (p_scheduled_ms))
    ORDER BY x.scheduled_ms
    FOR UPDATE
  ) r;

  -- Read after the wait for the locks.
  v_now_ms := coalesce(p_now_ms, floor(extract(epoch FROM clock_timestamp()) * 1000));

  FOREACH v_last IN ARRAY p_ends LOOP
    v_beside_stale := '{}';
    FOR pos, line, token, attempt, failures, ms, state, reason, own, others, v_has_stale IN
    WITH
    decided AS (
      SELECT (v_first - 1 + c.pos)::integer AS pos, c.scheduled_ms, c.due_ms, c.holder, c.decision_id,
        c.lease_ms, c.max_attempts, c.takeover_ms, c.on_overlap = 'allow' AS allow,
        j.id AS job_id, j.place, r.place AS run_place, r.state, r.token, r.attempt, r.failures,
        r.decision_id AS decided_by, r.until_ms, r.lease_ms AS granted_ms,
        coalesce(u.unreadable, r.reason) AS reason,
        o.live_until_ms, o.running_until_ms, o.blocked_until_ms,
        l.line,
        l.line IN ('first', 'next', 'takeover') AS grants,
        l.line IN ('abandoned', 'runner lost', 'overlap') AS settles,
        -- Never below the store's clock: tokens go on rising when the job's record was lost.
        greatest(j.last_token + 1, v_now_ms) AS next_token,
        coalesce(r.failures + (r.state = 'running')::integer, 0) AS failures_now,
        -- More than twice its length can only be left where the clock was set back.
        r.until_ms - v_now_ms > 2 * r.lease_ms AND l.line IN ('held', 'repeated') AS shortened,
        l.line = 'first' AND c.on_overlap <> 'allow' AND o.has_stale AS settles_stale,
        CASE WHEN l.line = 'first' AND c.on_overlap <> 'allow' THEN o.others_kept ELSE o.others END
          AS others
      FROM unnest(
          p_job[v_first : v_last], p_scheduled_ms[v_first : v_last], p_due_ms[v_first : v_last],
          p_holder[v_first : v_last], p_decision_id[v_first : v_last],
          p_lease_ms[v_first : v_last], p_max_attempts[v_first : v_last],
          p_on_overlap[v_first : v_last], p_max_age_ms[v_first : v_last],
          p_takeover_ms[v_first : v_last]
        ) WITH ORDINALITY AS c (
          job, scheduled_ms, due_ms, holder, decision_id, lease_ms, max_attempts, on_overlap,
          max_age_ms, takeover_ms, pos
        )
        LEFT JOIN LATERAL (
          SELECT x.ctid AS place, x.id, x.format, x.last_token, x.pruned_to_ms, x.pruned_first_ms,
            x.pruned_last_ms
          FROM {schema}.{prefix}job x
          WHERE x.space_id = v_space_id AND x.name = c.job LIMIT 1
        ) j ON true
        LEFT JOIN LATERAL (
          SELECT x.ctid AS place, x.* FROM {schema}.{prefix}run x
          WHERE x.job_id = j.id AND x.scheduled_ms = c.scheduled_ms LIMIT 1
        ) r ON true
        CROSS JOIN LATERAL (
          SELECT
            min(b.until_ms) FILTER (WHERE b.running AND b.until_ms > v_now_ms) AS live_until_ms,
            min(b.until_ms) FILTER (WHERE b.running) AS running_until_ms,
            min(b.until_ms) FILTER (
              WHERE b.running AND NOT b.stale OR b.goes_first
            ) AS blocked_until_ms,
            bool_or(b.running AND b.stale) AS has_stale,
            bool_or(NOT b.own) AS others,
            bool_or(NOT b.own AND NOT (b.running AND b.stale)) AS others_kept,
            min(b.scheduled_ms) FILTER (WHERE b.unreadable) AS unreadable_ms
          FROM (
            SELECT x.scheduled_ms, x.until_ms, x.state = 'running' AS running,
              v_now_ms - x.until_ms > c.takeover_ms AS stale,
              x.state = 'running' AND x.until_ms > v_now_ms AND x.holder = c.holder AS own,
              x.state = 'waiting' AND x.scheduled_ms < c.scheduled_ms AND (
                x.until_ms <= v_now_ms OR x.until_ms - v_now_ms > v_max_retry_delay_ms
              ) AS goes_first,
              x.format > v_format OR x.state NOT IN ('running', 'waiting') AS unreadable
            FROM {schema}.{prefix}run x
            WHERE x.unsettled_job_id = j.id AND x.scheduled_ms <> c.scheduled_ms
            OFFSET 0
          ) b
        ) o
        CROSS JOIN LATERAL (
          SELECT CASE
            WHEN j.format > v_format THEN format('the job has format %s', j.format)
            WHEN r.format > v_format THEN format('%s has format %s', r.scheduled_ms, r.format)
            WHEN r.state NOT IN ('running', 'waiting', 'finished', 'failed', 'skipped')
              THEN format('%s has state %s', r.scheduled_ms, r.state)
            WHEN o.unreadable_ms IS NOT NULL
              THEN format('%s has another format or state', o.unreadable_ms)
          END AS unreadable OFFSET 0
        ) u
        CROSS JOIN LATERAL (
          SELECT CASE
            WHEN u.unreadable IS NOT NULL THEN 'unreadable'
            WHEN r.state = 'running' THEN
              CASE
                WHEN r.until_ms > v_now_ms AND r.decision_id = c.decision_id THEN 'repeated'
                WHEN r.until_ms > v_now_ms THEN 'held'
                WHEN v_now_ms - r.until_ms > c.takeover_ms THEN 'abandoned'
                WHEN r.failures + 1 >= c.max_attempts THEN 'runner lost'
                WHEN c.on_overlap <> 'allow' AND o.live_until_ms IS NOT NULL THEN 'deferred'
                ELSE 'takeover'
              END
            WHEN r.state = 'waiting' THEN
              CASE
                WHEN r.until_ms - v_now_ms BETWEEN 1 AND v_max_retry_delay_ms THEN 'waiting'
                WHEN v_now_ms - r.until_ms > c.takeover_ms THEN 'abandoned'
                WHEN c.on_overlap <> 'allow' AND o.running_until_ms IS NOT NULL THEN 'deferred'
                ELSE 'next'
              END
            WHEN r.state IS NOT NULL THEN 'settled'
            WHEN v_now_ms < c.due_ms THEN 'early'
            -- When the newest of it lies ahead of the clock, the clock was ahead for long, and was
            -- set right: then only what was pruned itself counts, not all before it.
            WHEN c.scheduled_ms <= j.pruned_to_ms AND (
              j.pruned_to_ms <= v_now_ms OR EXISTS (
                SELECT FROM unnest(j.pruned_first_ms, j.pruned_last_ms) AS s (first_ms, last_ms)
                WHERE c.scheduled_ms BETWEEN s.first_ms AND s.last_ms
              )
            ) THEN 'too old'
            WHEN v_now_ms - c.due_ms > c.max_age_ms THEN 'too old'
            -- It was early a moment ago, so nobody has made its job.
            WHEN j.id IS NULL THEN 'early'
            WHEN c.on_overlap = 'allow' OR o.blocked_until_ms IS NULL THEN 'first'
            WHEN c.on_overlap = 'skip' THEN 'overlap'
            ELSE 'deferred'
          END AS line OFFSET 0
        ) l
    ),
    granted AS (
      UPDATE {schema}.{prefix}job j SET last_token = d.next_token
      FROM decided d WHERE d.grants AND j.ctid = d.place
    ),
    made AS (
      INSERT INTO {schema}.{prefix}run (
        job_id, scheduled_ms, space_id, format, state, token, attempt, failures, hand_overs,
        holder, decision_id, until_ms, lease_ms, max_attempts, overlap, takeover_ms, claimed_ms,
        settled_ms, reason, unsettled_job_id
      )
      SELECT d.job_id, d.scheduled_ms, v_space_id, v_format,
        CASE WHEN d.grants THEN 'running' ELSE 'skipped' END,
        CASE WHEN d.grants THEN d.next_token ELSE 0 END,
        d.grants::integer, 0, 0, d.holder, d.decision_id,
        CASE WHEN d.grants THEN v_now_ms + d.lease_ms ELSE 0 END,
        CASE WHEN d.grants THEN d.lease_ms ELSE 0 END,
        CASE WHEN d.grants THEN d.max_attempts ELSE 1 END,
        d.grants AND d.allow,
        CASE WHEN d.grants THEN d.takeover_ms ELSE 0 END,
        CASE WHEN d.grants THEN v_now_ms END,
        CASE WHEN NOT d.grants THEN v_now_ms END,
        CASE WHEN d.grants THEN '' ELSE 'overlap' END,
        CASE WHEN d.grants THEN d.job_id END
      FROM decided d
      WHERE d.state IS NULL AND (d.grants OR d.settles)
    ),
    changed AS (
      UPDATE {schema}.{prefix}run r SET
        format = v_format,
        state = CASE WHEN d.settles THEN 'failed' ELSE 'running' END,
        token = CASE WHEN d.grants THEN d.next_token ELSE r.token END,
        attempt = r.attempt + d.grants::integer,
        failures = CASE WHEN d.shortened THEN r.failures ELSE d.failures_now END,
        holder = CASE WHEN d.grants THEN d.holder ELSE r.holder END,
        decision_id = CASE WHEN d.shortened THEN r.decision_id ELSE d.decision_id END,
        until_ms = CASE WHEN d.grants THEN v_now_ms + d.lease_ms
          WHEN d.shortened THEN v_now_ms + r.lease_ms ELSE r.until_ms END,
        lease_ms = CASE WHEN d.grants THEN d.lease_ms ELSE r.lease_ms END,
        max_attempts = CASE WHEN d.grants THEN d.max_attempts ELSE r.max_attempts END,
        overlap = CASE WHEN d.grants THEN d.allow ELSE r.overlap END,
        takeover_ms = CASE WHEN d.grants THEN d.takeover_ms ELSE r.takeover_ms END,
        claimed_ms = CASE WHEN d.grants THEN v_now_ms ELSE r.claimed_ms END,
        settled_ms = CASE WHEN d.settles THEN v_now_ms END,
        reason = CASE WHEN d.settles THEN d.line WHEN d.grants THEN '' ELSE r.reason END,
        unsettled_job_id = CASE WHEN NOT d.settles THEN r.job_id END
      FROM decided d
      WHERE d.state IS NOT NULL AND (d.grants OR d.settles OR d.shortened)
        AND r.ctid = d.run_place
    )
    SELECT d.pos, d.line,
      CASE WHEN d.grants THEN d.next_token ELSE d.token END,
      coalesce(d.attempt, 0) + d.grants::integer,
      CASE WHEN d.grants THEN d.failures_now ELSE d.failures END,
      CASE
        WHEN d.grants THEN d.lease_ms
        WHEN d.shortened THEN d.granted_ms
        WHEN d.line = 'early' THEN greatest(d.due_ms - v_now_ms, 0)
        WHEN d.line <> 'deferred' THEN d.until_ms - v_now_ms
        WHEN d.state = 'running' THEN greatest(d.live_until_ms - v_now_ms, 0)
        WHEN d.state = 'waiting' THEN greatest(d.running_until_ms - v_now_ms, 0)
        ELSE greatest(d.blocked_until_ms - v_now_ms, 0)
      END,
      d.state, d.reason, d.decided_by = d.decision_id, d.others, d.settles_stale
    FROM decided d
    LOOP
      RETURN NEXT;
      IF v_has_stale THEN
        v_beside_stale := v_beside_stale || pos;
      END IF;
    END LOOP;

    IF v_beside_stale <> '{}' THEN
      -- A run that lapsed too long ago does not hold its job up. It is settled here and now: left
      -- as it is, a late renewal would make it a second running run of the job.
      RETURN QUERY
      WITH stale AS (
        SELECT g.pos, o.place, o.scheduled_ms
        FROM unnest(v_beside_stale) AS g (pos)
          CROSS JOIN LATERAL (
            SELECT x.id FROM {schema}.{prefix}job x
            WHERE x.space_id = v_space_id AND x.name = p_job[g.pos] LIMIT 1
          ) j
          CROSS JOIN LATERAL (
            SELECT x.ctid AS place, x.scheduled_ms FROM {schema}.{prefix}run x
            WHERE x.unsettled_job_id = j.id AND x.scheduled_ms <> p_scheduled_ms[g.pos]
              AND x.state = 'running' AND v_now_ms - x.until_ms > p_takeover_ms[g.pos]
            ORDER BY x.scheduled_ms
          ) o
      ),
      settled AS (
        UPDATE {schema}.{prefix}run r SET
          state = 'failed', decision_id = p_decision_id[s.pos], failures = r.failures + 1,
          settled_ms = v_now_ms, reason = 'abandoned', unsettled_job_id = NULL
        FROM stale s WHERE r.ctid = s.place
      )
      SELECT s.pos, 'beside', NULL::bigint, NULL::bigint, NULL::bigint, s.scheduled_ms,
        NULL, NULL, NULL::boolean, NULL::boolean
      FROM stale s;
    END IF;
    v_first := v_last + 1;
  END LOOP;
END
$body$;
