/* SPDX-License-Identifier: Apache-2.0 */
/* A fake libvirt: two domains, and their events in six iterations of its loop. */
#include <stdlib.h>
#include <string.h>

struct domain { const char *name, *uuid; int state; };
static struct domain domains[] = {
	{ "db01", "6b5a8a52-0a5b-4b52-9d5c-000000000001", 1 },
	{ "we\nb", "6b5a8a52-0a5b-4b52-9d5c-000000000002", 1 },
};
static int connection, turns, freed;
static int (*lived)(void *, void *, int, int, void *);
static void (*tuned)(void *, void *, void *, int, void *);
static void (*closed)(void *, int, void *);
static void *of_life, *of_tune, *of_close;

void virSetErrorFunc(void *data, void *call) { (void)data; (void)call; }
int virEventRegisterDefaultImpl(void) { return 0; }
const char *virGetLastErrorMessage(void) { return "no daemon answers here"; }

void *virConnectOpenReadOnly(const char *uri)
{
	return strcmp(uri, "qemu:///system") ? NULL : &connection;
}

int virConnectSetKeepAlive(void *c, int seconds, unsigned count)
{
	return c == &connection && seconds > 0 && count > 0 ? 0 : -1;
}

int virConnectRegisterCloseCallback(void *c, void (*call)(void *, int, void *), void *opaque, void *release)
{
	(void)c; (void)release;
	closed = call;
	of_close = opaque;
	return 0;
}

int virConnectDomainEventRegisterAny(void *c, void *domain, int event, void *call, void *opaque, void *release)
{
	(void)c; (void)release;
	if (domain || event == 19) /* all domains only; an old library lacks event 19 */
		return -1;
	if (event == 0) {
		lived = (int (*)(void *, void *, int, int, void *))call;
		of_life = opaque;
	} else if (event == 17) {
		tuned = (void (*)(void *, void *, void *, int, void *))call;
		of_tune = opaque;
	}
	return event;
}

int virConnectListAllDomains(void *c, void ***all, unsigned flags)
{
	if (c != &connection || flags != 1)
		return -1;
	*all = calloc(2, sizeof(void *));
	(*all)[0] = &domains[0];
	return 1;
}

const char *virDomainGetName(void *d) { return ((struct domain *)d)->name; }
int virDomainFree(void *d) { (void)d; freed++; return 0; }

int virDomainGetUUIDString(void *d, char *buffer)
{
	strcpy(buffer, ((struct domain *)d)->uuid);
	return 0;
}

int virDomainGetState(void *d, int *state, int *reason, unsigned flags)
{
	(void)reason; (void)flags;
	*state = ((struct domain *)d)->state;
	return 0;
}

int virEventRunDefaultImpl(void)
{
	switch (turns++) {
	case 0: lived(&connection, &domains[1], 2, 0, of_life); break; /* started */
	case 1: lived(&connection, &domains[1], 0, 0, of_life); break; /* defined: not reported */
	case 2: tuned(&connection, &domains[0], NULL, 0, of_tune); break;
	case 3: domains[0].state = 3; lived(&connection, &domains[0], 3, 0, of_life); break; /* suspended */
	case 4: lived(&connection, &domains[1], 5, 0, of_life); break; /* stopped */
	case 5: closed(&connection, freed == 1 ? 1 : 0, of_close); break;
	default: abort();
	}
	return 0;
}
