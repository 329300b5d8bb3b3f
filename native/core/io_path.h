/* The absolute path of a file that an ls_io function is called on, for the recorder. */
#ifndef LS_IO_PATH_H
#define LS_IO_PATH_H

/* Returns the path of `fd`, or of `name` in the directory `fd`, without links.  NULL if the kernel
 * does not know it or there is no memory.  The caller frees it. */
char *ls_io_path(int fd, const char *name);

#endif
