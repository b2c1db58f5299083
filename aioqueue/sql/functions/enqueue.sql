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
    PERFORM aioqueue.enqueue_alike(
        ARRAY[job_id], coalesce(enqueue.payload::text, 'null'), enqueue.task, enqueue.tenant, enqueue.queue, enqueue.priority,
        enqueue.delay, enqueue.run_at, enqueue.max_attempts, enqueue.key);
    RETURN job_id;
END $$;
