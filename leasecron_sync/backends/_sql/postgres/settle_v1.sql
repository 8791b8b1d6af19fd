-- Reports how attempts ended. The arrays hold an element for each of them; they are decided in turn,
-- since two may concern one run. Of the columns that are returned, "unreadable" says why the record
-- cannot be read, and the state is null where there is none.
CREATE OR REPLACE FUNCTION {schema}.{prefix}settle_v1(
  p_space text, p_now_ms bigint, p_job text[], p_scheduled_ms bigint[], p_token bigint[],
  p_outcome text[], p_reason text[], p_delay_ms bigint[]
) RETURNS TABLE (pos integer, accepted boolean, state text, wait_ms bigint, unreadable text)
LANGUAGE plpgsql
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $body$
#variable_conflict use_column
DECLARE
  v_format CONSTANT integer := 1;
  v_free_hand_overs CONSTANT bigint := 9;
  v_space_id bigint;
  v_run {schema}.{prefix}run%ROWTYPE;
  v_counted integer;
  v_now_ms bigint;
BEGIN
  SELECT s.id INTO v_space_id FROM {schema}.{prefix}space s WHERE s.name = p_space;
  -- All locks at once, in key order, as claims and renewals take them.
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

  FOR v_pos IN 1 .. cardinality(p_job) LOOP
    SELECT r.* INTO v_run
    FROM {schema}.{prefix}run r
    WHERE r.scheduled_ms = p_scheduled_ms[v_pos] AND r.job_id = (
      SELECT j.id FROM {schema}.{prefix}job j
      WHERE j.space_id = v_space_id AND j.name = p_job[v_pos]
    );
    pos := v_pos;
    accepted := false;
    state := v_run.state;
    wait_ms := 0;
    unreadable := NULL;
    IF v_run.format > v_format THEN
      unreadable := format('%s has format %s', v_run.scheduled_ms, v_run.format);
    ELSIF v_run.state NOT IN ('running', 'waiting', 'finished', 'failed', 'skipped') THEN
      unreadable := format('%s has state %s', v_run.scheduled_ms, v_run.state);
    ELSIF v_run.token IS DISTINCT FROM p_token[v_pos] THEN
      NULL; -- fenced
    ELSIF v_run.state <> 'running' THEN
      -- The token's own settlement, asked again after a lost reply. One that a claim or pruning
      -- settled has a decision id: it was taken out of the holder's hands.
      accepted := v_run.decision_id = '';
    ELSE
      accepted := true;
      IF p_outcome[v_pos] = 'finished' THEN
        v_run.state := 'finished';
      ELSE
        v_counted := 1;
        IF p_outcome[v_pos] = 'handed_over' THEN
          v_run.hand_overs := v_run.hand_overs + 1;
          v_counted := (v_run.hand_overs > v_free_hand_overs)::integer;
        END IF;
        v_run.failures := v_run.failures + v_counted;
        IF v_counted > 0 AND v_run.failures >= v_run.max_attempts THEN
          v_run.state := 'failed';
        ELSE
          v_run.state := 'waiting';
          v_run.until_ms := v_now_ms;
          IF p_outcome[v_pos] = 'failed' THEN
            v_run.until_ms := v_now_ms + p_delay_ms[v_pos];
          END IF;
        END IF;
      END IF;
      UPDATE {schema}.{prefix}run r SET
        state = v_run.state, failures = v_run.failures, hand_overs = v_run.hand_overs,
        decision_id = '', until_ms = v_run.until_ms, reason = p_reason[v_pos],
        settled_ms = CASE WHEN v_run.state <> 'waiting' THEN v_now_ms END,
        unsettled_job_id = CASE WHEN v_run.state = 'waiting' THEN v_run.job_id END
      WHERE r.job_id = v_run.job_id AND r.scheduled_ms = v_run.scheduled_ms;
      state := v_run.state;
    END IF;
    IF accepted AND state = 'waiting' THEN
      wait_ms := greatest(v_run.until_ms - v_now_ms, 0);
    END IF;
    RETURN NEXT;
  END LOOP;
END
$body$;
