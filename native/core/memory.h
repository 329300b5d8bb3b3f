/* Large blocks of memory, used again.
 *
 * A chunk of columns is several MiB that live for a moment.  From malloc, each would be fresh pages
 * of the kernel, and touching those costs more than decoding into them; so a few released blocks
 * are kept.  Thread-safe.  Each block has slack after its end that may be written to.
 */
#ifndef LS_MEMORY_H
#define LS_MEMORY_H

#include <stddef.h>

enum { LS_MEMORY_SLACK = 64 };

/* At least `size` bytes and the slack; NULL when there is no memory. */
void *ls_memory_take(size_t size);

/* The same with the first `used` bytes kept; on NULL the old block is as it was. */
void *ls_memory_grow(void *block, size_t used, size_t size);

/* Page-aligned memory for what the kernel copies from or into: starting a few bytes into a page, as a
 * large malloc does, that copy has been seen to take five times as long.  No slack. */
void *ls_memory_pages(size_t size);
void ls_memory_give_pages(void *pages);

/* NULL is fine. */
void ls_memory_give(void *block);

#endif
