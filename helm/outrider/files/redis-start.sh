#!/bin/sh
# Starts a store with two users: outrider, with the rights that its clients need, and keeper, who may
# ask whether it lives and hand it renewed certificates; with orchestrator, where that one has other
# rights; and with those of `users`. No password stands in an argument.
set -eu
umask 077
etc=/etc/outrider
run=/run/outrider
server=$(command -v valkey-server || command -v redis-server)
cli=$(command -v valkey-cli || command -v redis-cli)
hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
keeper=$(head -c 32 /dev/urandom | sha256sum | cut -d' ' -f1)
printf %s "$keeper" >"$run/keeper"
{
    cat $etc/config/redis.conf
    echo "user default off"
    echo "user outrider on #$(hash "$(cat $etc/password/password)") $(cat $etc/config/rights)"
    [ ! -f $etc/config/orchestrator-rights ] || echo "user orchestrator on" \
        "#$(hash "$(cat $etc/password/orchestrator)") $(cat $etc/config/orchestrator-rights)"
    echo "user keeper on #$(hash "$keeper") -@all +ping +config|set"
    while read -r name rights; do
        [ -z "$name" ] || echo "user $name on #$(hash "$(cat "$etc/users/$name/password")") $rights"
    done <$etc/config/users
} >"$run/redis.conf"

# A certificate that is renewed is taken up without a restart.
follow_certificates() {
    seen=$(cat $etc/tls/* | sha256sum)
    while sleep 30; do
        now=$(cat $etc/tls/* | sha256sum)
        if [ "$now" != "$seen" ] && REDISCLI_AUTH=$keeper "$cli" -s "$run/redis.sock" \
            --user keeper --no-auth-warning -e CONFIG SET tls-ca-cert-file $etc/tls/ca.crt \
            tls-cert-file $etc/tls/tls.crt tls-key-file $etc/tls/tls.key; then
            seen=$now
        fi
    done
}
if [ -d $etc/tls ]; then follow_certificates & fi
exec "$server" "$run/redis.conf"
