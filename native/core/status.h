/* Result codes of the core.
 *
 * Every function that can fail returns an ls_status by value.  It holds the facts for an error text:
 * the errno of a failed system call (read once, right after the call), the position in the file, and
 * a constant English reason.  `reason` always points at a string literal.
 */
#ifndef LS_STATUS_H
#define LS_STATUS_H

#include <stdint.h>

typedef enum {
    LS_OK = 0,
    LS_END,           /* no more input; not an error */
    LS_E_IO,          /* a system call failed: see `os_errno` */
    LS_E_CORRUPT,     /* bytes that cannot be what was written */
    LS_E_LEGACY,      /* message format 0 or 1 with a right checksum; not supported */
    LS_E_CODEC,       /* unknown compression bits */
    LS_E_TOO_LARGE,   /* a record, batch or segment beyond its configured limit */
    LS_E_NO_MEMORY,
    LS_E_INVALID,     /* the caller's argument */
    LS_E_UNDONE       /* a write failed and could not be taken back */
} ls_code;

typedef struct {
    ls_code code;
    int os_errno;
    int64_t position;     /* byte position in the file, or in the buffer; -1 if none */
    const char *reason;
} ls_status;

static inline ls_status ls_ok(void)
{
    return (ls_status){LS_OK, 0, -1, ""};
}

static inline ls_status ls_fail(ls_code code, int64_t position, const char *reason)
{
    return (ls_status){code, 0, position, reason};
}

static inline ls_status ls_fail_os(int os_errno, int64_t position, const char *reason)
{
    return (ls_status){LS_E_IO, os_errno, position, reason};
}

#endif
