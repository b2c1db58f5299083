-- serves: 5
-- Outcomes that are successes come in arrays (functions/record.sql); the defaults keep the old call.
DROP FUNCTION IF EXISTS aioqueue.record(bigint, jsonb);
