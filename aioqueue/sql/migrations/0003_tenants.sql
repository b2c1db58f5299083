-- serves: 3
-- Tasks whose jobs must have a tenant; finish and confirm are told every setting that must still be as it was.
ALTER TABLE aioqueue.task ADD COLUMN require_tenant boolean NOT NULL DEFAULT false;
DROP FUNCTION IF EXISTS aioqueue.finish(bigint, bigint, bigint, uuid, integer, text, text, text, jsonb);
DROP FUNCTION IF EXISTS aioqueue.confirm(bigint, bigint, bigint, uuid, integer, text, text, text);
DROP FUNCTION IF EXISTS aioqueue.check_transaction(text, text, text);
DROP FUNCTION IF EXISTS aioqueue.scrub();
