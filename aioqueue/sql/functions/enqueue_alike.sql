-- enqueue_alike: (nothing) → ready or scheduled, for jobs that differ in id and payload only: enqueue_many of an object,
-- {"task", "tenant", "queue", "priority", "delay", "run_at", "max_attempts", "key", "ids": […], "payloads": […]}, in two thirds
-- of the time that as many objects take. Everything that enqueue_many says holds here; it calls this with the XID taken.
-- A subtransaction each: for large batches only, or a transaction with more than 64 of them makes all snapshots dearer.
-- Where an id is there already, all that this wrote is undone (a savepoint), and enqueue_many is asked job by job.
CREATE OR REPLACE FUNCTION aioqueue.enqueue_alike(jobs jsonb) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ids uuid[]; n integer; at timestamptz := clock_timestamp(); due timestamptz; t aioqueue.task; bad text; lane bigint; tag bigint; apart bigint;
    task_ text := jobs ->> 'task'; tenant_ text := jobs ->> 'tenant'; queue_ text := jobs ->> 'queue'; key_ text := jobs ->> 'key';
    priority_ integer := (jobs ->> 'priority')::integer; attempts integer := (jobs ->> 'max_attempts')::integer;
BEGIN
    SELECT coalesce(array_agg(e::uuid), '{}') INTO ids FROM jsonb_array_elements_text(jobs -> 'ids') AS e;
    n := cardinality(ids);
    IF n <> jsonb_array_length(jobs -> 'payloads') THEN
        RAISE invalid_parameter_value USING MESSAGE = 'jobs: expected as many payloads as ids';
    END IF;
    IF n = 0 THEN
        RETURN;
    END IF;
    SELECT k.* INTO t FROM aioqueue.task k WHERE k.name = task_;
    IF t.require_tenant AND tenant_ IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ004', MESSAGE = 'tenant: task ' || task_ || ' runs for a tenant only; name one';
    END IF;
    IF jobs ->> 'run_at' IS NOT NULL AND jobs ->> 'delay' IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'delay, run_at: expected one of them at most, got both';
    END IF;
    due := coalesce((jobs ->> 'run_at')::timestamptz, at + (jobs ->> 'delay')::interval);
    queue_ := coalesce(queue_, t.queue, 'default'); priority_ := coalesce(priority_, t.priority, 0); attempts := coalesce(attempts, t.max_attempts, 5);
    bad := aioqueue.job_refusal(task_, queue_, tenant_, key_, priority_, attempts, due);
    IF bad IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'job 1 of ' || n || ': ' || bad;
    END IF;
    BEGIN
        INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
        SELECT e.id, task_, queue_, coalesce(tenant_, ''), priority_, attempts, e.payload, at, due, key_
          FROM ROWS FROM (unnest(ids), jsonb_array_elements(jobs -> 'payloads')) AS e (id, payload);
    EXCEPTION WHEN unique_violation THEN
        RETURN QUERY SELECT m FROM aioqueue.enqueue_many((
            SELECT jsonb_agg((jobs - '{ids,payloads}'::text[]) || jsonb_build_object('id', e.id, 'payload', e.payload))
              FROM ROWS FROM (unnest(ids), jsonb_array_elements(jobs -> 'payloads')) AS e (id, payload))) AS m;
        RETURN;
    END;
    lane := aioqueue.lane(queue_, priority_); tenant_ := coalesce(tenant_, '');
    IF due > at THEN
        INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
        SELECT greatest(due, clock_timestamp()), u, lane, tenant_ FROM unnest(ids) AS u;
    ELSE
        apart := aioqueue.step(tenant_);
        tag := aioqueue.next_tag(lane, tenant_, apart, n);
        INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
        SELECT lane, tag + apart * u.i, u.id, tenant_, 0, 0 FROM unnest(ids) WITH ORDINALITY AS u (id, i);
    END IF;
    RETURN QUERY SELECT unnest(ids);
END $$;
