-- serves: 5
-- rescue also returns the ids of the jobs that it has moved, for the log; code that reads two columns goes on.
DROP FUNCTION IF EXISTS aioqueue.rescue(bigint, integer, jsonb, jsonb);
