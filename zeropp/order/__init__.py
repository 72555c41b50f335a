"""The order of collectives: which gathers and reductions are issued, and when; equal on every rank.

Code in this room decides from units (an index and a state) and from data that ranks have exchanged. It uses no
``nn.Module``, no autograd and no process group. Start with `schedule`, which issues gathers and releases units.
`known_orders` stores learned orders, `prefetch` plans which units are gathered ahead, `reductions` issues the
reductions of gradients, and `refresh` renews cached weights.

An *order* is the sequence of units that all ranks gather in one kind of phase (a forward or a backward). A *use* is one
position of it. A *call* is one run of a module, or one touch of a parameter outside of its module.

[Note: how ranks may diverge] A rank that follows an order may skip units, use them in another sequence, or need a unit
that the order lacks. The rules below make all ranks issue the same collectives in the same order. They use no clock:
each exchange (a small collective on integers) takes place at a position that follows from data which all ranks share.

1. *Skipped units.* A rank gathers a unit that it skips, because the other ranks need its shard. The rank retains the
   unit: keeps it gathered, because the rank may use the unit later and cannot gather it without the other ranks.
2. *Forks.* A fork is a position where known orders of a kind part, or where a rank once needed a unit that no known
   order had. There all ranks exchange the units that they need next. They continue with the known order that has all
   of these units soonest. If there is none, they learn from there on.
3. *Missing units.* A rank may need a unit that the rest of the order lacks. The rank issues the rest of the order up
   to the next fork or the end, as the other ranks do, and asks for the unit there. If all ranks left the order at one
   position, the newly learned order goes on from that position. If only some ranks left it there, the learned order is
   the union; if the union exceeds ``stage3_max_live_parameters``, the position is stored as a fork instead.
4. *Exchange at the end.* Ranks exchange at the end of the order only if phases of the kind have varied or may vary
   (`KnownOrders.may_vary`), or if a backward may bring new gradients after gradients were edited. In all other phases
   no rank may need a unit at the end. Rules 5 and 6 ensure that. ``static_graph`` turns this exchange and forks off.
5. *Counted calls.* One gather may serve several calls: calls inside another module of the unit, calls while a touched
   parameter keeps the unit, or calls in a backward that waits for the unit's last gradient. A rank that skips the
   outer module would release the unit between the calls, and need more gathers than the order has. So an order
   stores how many calls each use served when it was learned. A rank that follows it computes for each unit
   ``owed = calls served by the uses passed - calls that this rank made``, and keeps the unit while ``owed > 0``. If a
   rank has released a unit, the uses that are left serve at least as many calls as the rank may still make.
6. *Calls that are not counted.* A module that ran only inside another module of its unit has no counted calls. A rank
   that runs it outside keeps the unit until the phase ends. In backward, autograd tells how many calls of a unit are
   to come (`Schedule.expect_reached`); a rank keeps the unit while more calls are to come than uses are left.
7. *Partial backwards.* If a backward left out one of several forwards before it, the next backwards of its kind end
   with an exchange, because they may reach that forward and bring more gradients.
8. *Errors.* Without an exchange at the end, it is an error if a rank runs a module more often than any rank ever did:
   the other ranks do not issue the gather. If ranks differed in forwards of the same module in another mode
   (evaluation), the most calls of any rank there are known, too. If they exceed the calls in the order, phases end
   with an exchange.
"""
