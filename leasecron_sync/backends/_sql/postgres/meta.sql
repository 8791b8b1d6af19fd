-- What the store says of itself; the id tells a store that lost its data from the one before.
INSERT INTO {schema}.{prefix}meta (name, value)
VALUES ('format', '1'), ('store_id', replace(gen_random_uuid()::text, '-', ''))
ON CONFLICT (name) DO NOTHING;
