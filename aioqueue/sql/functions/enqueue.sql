-- enqueue: (nothing) → ready or scheduled, one job, in the caller's transaction; the way in for psql, triggers and every
-- language. Written on enqueue_alike, which says what holds.
CREATE OR REPLACE FUNCTION aioqueue.enqueue(
    task text, payload jsonb DEFAULT '{}', tenant text DEFAULT NULL, queue text DEFAULT NULL, priority integer DEFAULT NULL,
    delay interval DEFAULT NULL, run_at timestamptz DEFAULT NULL, max_attempts integer DEFAULT NULL, id uuid DEFAULT NULL,
    key text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    job_id uuid := coalesce(enqueue.id, aioqueue.uuidv7());
BEGIN
    PERFORM aioqueue.enqueue_alike(jsonb_build_object(
        'task', enqueue.task, 'tenant', enqueue.tenant, 'queue', enqueue.queue, 'priority', enqueue.priority,
        'delay', enqueue.delay, 'run_at', enqueue.run_at, 'max_attempts', enqueue.max_attempts, 'key', enqueue.key),
        ARRAY[job_id], coalesce(enqueue.payload::text, 'null'));
    RETURN job_id;
END $$;
