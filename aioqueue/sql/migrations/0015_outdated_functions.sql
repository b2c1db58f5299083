-- serves: 5
-- Every function whose parameters or results have changed since some version, for databases of that version: beside the function
-- of now it would make calls ambiguous, and a result cannot be changed in place. Some earlier migrations drop theirs, not all:
-- databases of the first version could not be brought up. From here on each migration drops what it changes so
-- (tests/test_migrate.py keeps the list).
DROP FUNCTION IF EXISTS aioqueue.beat(bigint, double precision, integer);
DROP FUNCTION IF EXISTS aioqueue.check_transaction(jsonb);
DROP FUNCTION IF EXISTS aioqueue.check_transaction(text, text, text);
DROP FUNCTION IF EXISTS aioqueue.claim(bigint, bigint[], bigint[], uuid[], integer[], integer);
DROP FUNCTION IF EXISTS aioqueue.claim(bigint, bigint[], bigint[], uuid[], integer[], integer[], integer);
DROP FUNCTION IF EXISTS aioqueue.confirm(bigint, bigint, bigint, uuid, integer, jsonb);
DROP FUNCTION IF EXISTS aioqueue.confirm(bigint, bigint, bigint, uuid, integer, text, text, text);
DROP FUNCTION IF EXISTS aioqueue.enqueue(text, jsonb, text, text, integer, interval, timestamptz, integer, uuid);
DROP FUNCTION IF EXISTS aioqueue.enqueue_alike(jsonb);
DROP FUNCTION IF EXISTS aioqueue.enqueue_alike(jsonb, uuid[], text);
DROP FUNCTION IF EXISTS aioqueue.finish(bigint, bigint, bigint, uuid, integer, jsonb, jsonb);
DROP FUNCTION IF EXISTS aioqueue.finish(bigint, bigint, bigint, uuid, integer, jsonb, jsonb, text[], boolean);
DROP FUNCTION IF EXISTS aioqueue.finish(bigint, bigint, bigint, uuid, integer, text, text, text, jsonb);
DROP FUNCTION IF EXISTS aioqueue.make_ranges(double precision, integer);
DROP FUNCTION IF EXISTS aioqueue.next_tag(bigint, text);
DROP FUNCTION IF EXISTS aioqueue.next_tag(bigint, text, bigint);
DROP FUNCTION IF EXISTS aioqueue.park_tenant(text, integer);
DROP FUNCTION IF EXISTS aioqueue.record(bigint, jsonb);
DROP FUNCTION IF EXISTS aioqueue.register_worker(bigint, text, integer, text, text[], integer, double precision, jsonb);
DROP FUNCTION IF EXISTS aioqueue.rescue(bigint, integer);
DROP FUNCTION IF EXISTS aioqueue.rescue(bigint, integer, jsonb, jsonb);
DROP FUNCTION IF EXISTS aioqueue.rescue_orphans(integer);
DROP FUNCTION IF EXISTS aioqueue.return_job(aioqueue.live, text, text, text, text, double precision, boolean, text);
DROP FUNCTION IF EXISTS aioqueue.scrub();
DROP FUNCTION IF EXISTS aioqueue.settle_limits(boolean);
DROP FUNCTION IF EXISTS aioqueue.step(text);
DROP FUNCTION IF EXISTS aioqueue.sweep_parked(integer, bigint[]);
DROP FUNCTION IF EXISTS aioqueue.sweep_parked(integer, bigint[], boolean);
DROP FUNCTION IF EXISTS aioqueue.tick(bigint, bigint[], bigint[], bigint[], uuid[], bigint[], timestamptz, timestamptz);
DROP FUNCTION IF EXISTS aioqueue.unknown_claims(bigint, uuid[]);
DROP FUNCTION IF EXISTS aioqueue.unpark_freed(bigint[]);
DROP FUNCTION IF EXISTS aioqueue.unpark_key(bigint, integer, bigint, bigint, integer);
