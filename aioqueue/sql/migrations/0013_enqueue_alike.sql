-- serves: 5
-- Jobs that differ in id and payload only come as options, ids and lines of JSON (functions/enqueue_alike.sql); older code gives
-- them to enqueue_many, and goes on.
DROP FUNCTION IF EXISTS aioqueue.enqueue_alike(jsonb);
DROP FUNCTION IF EXISTS aioqueue.enqueue_alike(jsonb, uuid[], text);
DROP FUNCTION IF EXISTS aioqueue.step(text);
-- What a job may be is said by job_refusal, once for a batch, before any is written; as constraints these cost a tenth of an enqueue:
-- they were read anew by every statement, and checked again for each row.
ALTER TABLE aioqueue.job
    DROP CONSTRAINT IF EXISTS task_is_a_name, DROP CONSTRAINT IF EXISTS queue_is_a_name, DROP CONSTRAINT IF EXISTS tenant_is_a_name,
    DROP CONSTRAINT IF EXISTS priority_is_a_level, DROP CONSTRAINT IF EXISTS max_attempts_is_positive,
    DROP CONSTRAINT IF EXISTS key_is_a_name;
