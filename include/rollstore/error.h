/*
 * rollstore/error.h: every error the library can return.
 *
 * Each function that can fail returns RST_OK (0) or one of the codes below, and fills the rst_error
 * it is given (NULL is allowed).  Numbers are never reused.  The library never prints, exits or
 * aborts.
 */
#ifndef ROLLSTORE_ERROR_H
#define ROLLSTORE_ERROR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(ROLLSTORE_BUILDING) || defined(__GNUC__)
#define RST_API __attribute__((visibility("default")))
#else
#define RST_API
#endif

typedef enum rst_code {
    RST_OK = 0,

    /* A reply was refused; rst_error.field names the field, .offset the byte where that is known.
     */
    RST_ERR_SYNTAX = 1,  /* not JSON, cut, trailing bytes, nested beyond RST_JSON_DEPTH_MAX */
    RST_ERR_MISSING = 2, /* a field that the mode needs is not there */
    RST_ERR_DTYPE = 3,   /* an unknown or absent dtype marker */
    RST_ERR_SHAPE = 4,   /* counts that do not fit one another */
    RST_ERR_BASE64 = 5,  /* a byte outside the alphabet, misplaced or absent padding */
    RST_ERR_VALUE = 6, /* NaN, +inf, a logprob over RST_LOGPROB_MAX, an id out of range or twice */
    RST_ERR_TYPE = 7,  /* a JSON value of another type than the field has */

    /* The call. */
    RST_ERR_ARGUMENT = 20,  /* an argument is out of its documented range */
    RST_ERR_LIMIT = 21,     /* a documented limit is exceeded */
    RST_ERR_MEMORY = 22,    /* an allocation failed */
    RST_ERR_FORKED = 23,    /* the handle was opened before a fork: open the store again here */
    RST_ERR_BUSY = 24,      /* the handle is in use in a way that forbids this call */
    RST_ERR_READ_ONLY = 25, /* a write through a handle that was opened read-only */

    /* Sessions and turns. */
    RST_ERR_NOT_FOUND = 40, /* no such session, turn, sequence number or consumer */
    RST_ERR_CONFLICT =
        41,              /* other bytes are stored there already, and replacing was not asked for */
    RST_ERR_ORDER = 42,  /* a turn before the ones that come before it */
    RST_ERR_SEALED = 43, /* the session has its outcome and takes no more turns */
    RST_ERR_ALIGNMENT = 44, /* a prompt contradicts or trims the tokens before it: no sample */
    RST_ERR_HELD = 45,      /* a consumer has not finished with the session */
    RST_ERR_LEASE = 46,     /* the session is not leased to the one who says so */

    /* Space and waiting. */
    RST_ERR_FULL = 60,     /* at capacity, and nothing was released within the timeout */
    RST_ERR_TIMEOUT = 61,  /* nothing came within the timeout */
    RST_ERR_READERS = 62,  /* every reader slot is taken */
    RST_ERR_NO_SPACE = 63, /* the file system has no room for the store's capacity */

    /* The store's files. */
    RST_ERR_EXISTS = 80,     /* creating where something is already */
    RST_ERR_NOT_STORE = 81,  /* no store at that path, or files that are none */
    RST_ERR_VERSION = 82,    /* a format this library does not know */
    RST_ERR_CORRUPT = 83,    /* bytes that no writer of this format leaves */
    RST_ERR_GONE = 84,       /* the store was deleted while it was open */
    RST_ERR_PERMISSION = 85, /* the operating system refuses access */
    RST_ERR_FILESYSTEM = 86, /* a file system that cannot hold a store (a network one) */
    RST_ERR_IO = 87          /* any other refusal of the operating system or LMDB */
} rst_code;

#define RST_ERROR_FIELD_SIZE 64
#define RST_ERROR_MESSAGE_SIZE 448

typedef struct rst_error {
    int code;       /* rst_code */
    int system;     /* errno where the operating system refused, else 0 */
    int64_t offset; /* byte offset in the reply or line, -1 when not known */
    int64_t index;  /* which element of a list argument failed (rst_apply, batches), -1 else */
    char field[RST_ERROR_FIELD_SIZE];     /* the reply's field or the argument, "" when none */
    char message[RST_ERROR_MESSAGE_SIZE]; /* one line of UTF-8: what is wrong, and where it helps,
                                             what to do */
} rst_error;

/* The code's short name in lower case ("syntax", "full"); "unknown" for a number that is none. The
 * string is static. */
RST_API const char *rst_code_name(int code);

/* One sentence about the code; static. */
RST_API const char *rst_code_text(int code);

/* The library's version, "MAJOR.MINOR.PATCH"; static. */
RST_API const char *rst_version(void);

#define RST_VERSION_MAJOR 0
#define RST_VERSION_MINOR 1
#define RST_VERSION_PATCH 0

#ifdef __cplusplus
}
#endif
#endif
