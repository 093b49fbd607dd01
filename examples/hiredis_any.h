/*
 * hiredis_any.h - hiredis 0.14 and later for store_valkey.c: what differs between its versions, and TLS.
 *
 * TLS needs hiredis 1.0 or later with its library for it, and OpenSSL 1.1 or later. Add to the command that compiles:
 *     -DHIREDIS_TLS -lhiredis_ssl -lssl -lcrypto     before -lhiredis
 * Without HIREDIS_TLS the options are known, and end the program with a sentence.
 *
 * The certificate of the server must be signed by the authority that was given, and be for the host that was given.
 */
#ifndef HIREDIS_ANY_H
#define HIREDIS_ANY_H

#include <hiredis/hiredis.h>
#include <stdint.h>
#include <string.h>

/* >>the reader. reply_item: the type of the item of a reply that the reader reads now; 0: none. */
#if HIREDIS_MAJOR < 1
typedef int list_length;
static inline int reply_item(const redisReader *r) { return r->ridx < 0 ? 0 : r->rstack[r->ridx].type; }
#else
typedef size_t list_length;
static inline int reply_item(const redisReader *r) { return r->ridx < 0 ? 0 : r->task[r->ridx]->type; }
#endif

/* >>TLS */
#define TLS_HELP                                                                                             \
    "  --tls FILE         TLS to --host; FILE has the certificate of the authority (PEM)\n"                  \
    "  --cert FILE        the program's own certificate, for a server that asks for one\n"                   \
    "  --key FILE         the key of that certificate\n"

typedef struct tls_link {
    const char *authority, *cert, *key; /* files; authority NULL: no TLS */
    void *context;                      /* an SSL_CTX */
} tls_link;

/* Takes an option of TLS. Returns 0 if it is another. */
static inline int tls_parse_option(tls_link *t, const char *name, const char *value) {
    const char **at = strcmp(name, "--tls") == 0    ? &t->authority
                      : strcmp(name, "--cert") == 0 ? &t->cert
                      : strcmp(name, "--key") == 0  ? &t->key
                                                    : NULL;
    if (at) *at = value;
    return at != NULL;
}

#ifdef HIREDIS_TLS
#if HIREDIS_MAJOR < 1
#error "TLS needs hiredis 1.0 or later. Compile without HIREDIS_TLS."
#endif
#include <hiredis/hiredis_ssl.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

/* Reads the files. Returns NULL, or why that failed. */
static inline const char *tls_open(tls_link *t) {
    SSL_CTX *c = t->authority ? SSL_CTX_new(TLS_client_method()) : NULL;
    t->context = c;
    if (!t->authority) return t->cert || t->key ? "--cert and --key need --tls" : NULL;
    if (!c || SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION) != 1) return "there is no TLS";
    SSL_CTX_set_verify(c, SSL_VERIFY_PEER, NULL);
    if (SSL_CTX_load_verify_locations(c, t->authority, NULL) != 1) return "cannot read the file of --tls";
    if (t->cert && SSL_CTX_use_certificate_chain_file(c, t->cert) != 1)
        return "cannot read the file of --cert";
    if (t->key && SSL_CTX_use_PrivateKey_file(c, t->key, SSL_FILETYPE_PEM) != 1)
        return "cannot read the file of --key, or it is the key of another certificate";
    return NULL;
}

/* Begins TLS on a connection that does not block. The handshake goes on in later calls. Returns 1 if it has begun. */
static inline int tls_begin(const tls_link *t, redisContext *server, const char *host) {
    SSL *ssl = SSL_new((SSL_CTX *)t->context);
    void *name = (void *)(uintptr_t)host; /* which is copied */
    const int is_named =
        ssl && (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1 ||
                (SSL_set1_host(ssl, host) == 1 &&
                 SSL_ctrl(ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, name) == 1));
    if (is_named && redisInitiateSSL(server, ssl) == REDIS_OK) return 1; /* redisFree frees ssl */
    SSL_free(ssl);
    return 0;
}

static inline void tls_close(tls_link *t) { SSL_CTX_free((SSL_CTX *)t->context); }
#else
static inline const char *tls_open(tls_link *t) {
    return t->authority || t->cert || t->key ? "this program was built without TLS: compile it as "
                                               "examples/hiredis_any.h says, with hiredis "
                                               "1.0 or later, or use --socket or a tunnel"
                                             : NULL;
}
static inline int tls_begin(const tls_link *t, redisContext *server, const char *host) {
    return t->authority != NULL && server != NULL && host != NULL && 0;
}
static inline void tls_close(tls_link *t) { t->context = NULL; }
#endif

#endif /* HIREDIS_ANY_H */
