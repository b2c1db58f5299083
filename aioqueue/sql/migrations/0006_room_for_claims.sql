-- serves: 5
-- Room in each page of live for a second, larger version of every row: worker and claimed_at are NULL until the claim. At 50, a
-- tenth of the claims found none, and made new entries in all three indexes; under a held horizon as many as a third.
ALTER TABLE aioqueue.live SET (fillfactor = 40);
