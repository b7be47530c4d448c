#!/bin/sh
# Starts the store with two users: outrider, with the rights that orchestrators need, and keeper, who
# may ask whether it lives and hand it renewed certificates. No password stands in an argument.
set -eu
umask 077
run=/run/outrider
server=$(command -v valkey-server || command -v redis-server)
cli=$(command -v valkey-cli || command -v redis-cli)
hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
keeper=$(head -c 32 /dev/urandom | sha256sum | cut -d' ' -f1)
printf %s "$keeper" >"$run/keeper"
{
    cat /etc/outrider/config/redis.conf
    echo "user default off"
    echo "user outrider on #$(hash "$(cat /etc/outrider/password/password)") ~outrider:* $(cat /etc/outrider/config/rights)"
    echo "user keeper on #$(hash "$keeper") -@all +ping +config|set"
} >"$run/redis.conf"

# A certificate that is renewed is taken up without a restart.
follow_certificates() {
    seen=$(cat /etc/outrider/tls/* | sha256sum)
    while sleep 30; do
        now=$(cat /etc/outrider/tls/* | sha256sum)
        if [ "$now" != "$seen" ] && REDISCLI_AUTH=$keeper "$cli" -s "$run/redis.sock" \
            --user keeper --no-auth-warning -e CONFIG SET tls-ca-cert-file /etc/outrider/tls/ca.crt \
            tls-cert-file /etc/outrider/tls/tls.crt tls-key-file /etc/outrider/tls/tls.key; then
            seen=$now
        fi
    done
}
if [ -d /etc/outrider/tls ]; then follow_certificates & fi
exec "$server" "$run/redis.conf"
