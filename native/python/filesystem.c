/* filesystem_name: the kind of file system of a directory.
 *
 * It changes nothing and reads no file of a log, so it does not use ls_io.
 */
#include "module.h"

#include <errno.h>

#if defined(__linux__)
#include <sys/vfs.h>

static const struct {
    unsigned long magic;
    const char *name;
} known[] = {
    {0x6969UL, "nfs"},       {0x517BUL, "smb"},         {0xFE534D42UL, "smb"},
    {0xFF534D42UL, "cifs"},  {0x01021997UL, "9p"},      {0x65735546UL, "fuse"},
    {0x00C36400UL, "ceph"},  {0x5346414FUL, "afs"},     {0x0BD00BD0UL, "lustre"},
    {0x01021994UL, "tmpfs"}, {0x858458F6UL, "ramfs"},   {0xEF53UL, "ext4"},
    {0x58465342UL, "xfs"},   {0x9123683EUL, "btrfs"},   {0x794C7630UL, "overlay"},
    {0x2FC12FC1UL, "zfs"},   {0xF2F52010UL, "f2fs"},
};

static const char *name_of(int fd, char *room, size_t size)
{
    struct statfs status;
    if (fstatfs(fd, &status) < 0) {
        return NULL;
    }
    unsigned long magic = (unsigned long)status.f_type & 0xFFFFFFFFUL;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (known[i].magic == magic) {
            return known[i].name;
        }
    }
    PyOS_snprintf(room, size, "%#lx", magic);
    return room;
}
#elif defined(__APPLE__)
#include <string.h>
#include <sys/mount.h>
#include <sys/param.h>

static const char *name_of(int fd, char *room, size_t size)
{
    struct statfs status;
    if (fstatfs(fd, &status) < 0) {
        return NULL;
    }
    PyOS_snprintf(room, size, "%s", status.f_fstypename);
    return room;
}
#else
static const char *name_of(int fd, char *room, size_t size)
{
    (void)fd, (void)room, (void)size;
    return "";
}
#endif

static PyObject *filesystem_name(PyObject *Py_UNUSED(self), PyObject *arg)
{
    int fd = (int)PyLong_AsLong(arg);
    if (fd == -1 && PyErr_Occurred()) {
        return NULL;
    }
    char room[32];
    const char *name = name_of(fd, room, sizeof room);
    return name == NULL ? PyErr_SetFromErrno(PyExc_OSError) : PyUnicode_FromString(name);
}

PyMethodDef ls_filesystem_functions[] = {
    {"filesystem_name", filesystem_name, METH_O,
     PyDoc_STR("filesystem_name(directory) -> str: the kind of file system, or its number in hex")},
    {NULL, NULL, 0, NULL},
};
