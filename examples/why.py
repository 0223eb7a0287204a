from quickstart import plan

print()
print(plan.why("[0]['up']"))
print()
print(plan.shadow_prices())
print()
print(plan.front())
print()
print(plan.minimal())
