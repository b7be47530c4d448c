#!/bin/sh
# Fails unless the store answers, which it does not while it loads its log.
cli=$(command -v valkey-cli || command -v redis-cli)
REDISCLI_AUTH=$(cat /run/outrider/keeper) "$cli" -s /run/outrider/redis.sock --user keeper \
    --no-auth-warning ping | grep -q PONG
