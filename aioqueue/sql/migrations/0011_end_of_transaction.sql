-- serves: 5
-- finish and confirm take the settings that they check as an array; older code, which gives an object, goes on.
DROP FUNCTION IF EXISTS aioqueue.finish(bigint, bigint, bigint, uuid, integer, jsonb, jsonb);
DROP FUNCTION IF EXISTS aioqueue.confirm(bigint, bigint, bigint, uuid, integer, jsonb);
DROP FUNCTION IF EXISTS aioqueue.check_transaction(jsonb);
